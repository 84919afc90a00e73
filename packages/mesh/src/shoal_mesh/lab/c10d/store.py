"""`LabStore`: a store of c10d whose values are kept by the scheduler of a lab."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..._torch import Store
from ..scheduling.store_request import StoreRequest
from .link import SchedulerLink, program_frames


class LabStore(Store):
    """A store that all ranks of a lab share.

    Args:
        link: the link of this rank.
        prefix: prefix of the keys of this store.
    """

    def __init__(self, link: SchedulerLink, prefix: str = "") -> None:
        super().__init__()
        self._link = link
        self._prefix = prefix
        link.stores.append(self)

    def _ask(
        self, op: str, keys: Sequence[str], values: Sequence[Any] = (), *, expires: bool = False
    ) -> Any:
        # c10d puts names of groups into keys. On threads these names end with a suffix of the rank,
        # which is removed. ("\0" is in no key.)
        suffix = self._link.facts.suffix or "\0"
        names = tuple((self._prefix + key).replace(suffix, "") for key in keys)
        request = StoreRequest(op, names, tuple(values), expires=expires, frames=program_frames())
        try:
            return self._link.ask_store(request)
        except TimeoutError as error:
            raise dist.DistStoreError(f"wait timeout: {error}; no rank can set it") from error

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", [key], [_bytes_of(value)])

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until it has one."""
        value: bytes = self._ask("get", [key])[0]
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key, and return the sum."""
        total: int = self._ask("add", [key], [amount])
        return total

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._ask("check", keys))

    def wait(self, keys: list[str], timeout: dt.timedelta | None = None) -> None:
        """Wait until all keys have values.

        With any timeout it raises as soon as all ranks wait and no value can arrive.
        """
        self._ask("wait", keys, expires=timeout is not None)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key that has an expected value, and return the value that it has then."""
        values = [_bytes_of(expected), _bytes_of(desired)]
        present: bytes = self._ask("compare_set", [key], values)
        return present

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it had a value."""
        return bool(self._ask("delete", [key]))

    # the name that PrefixStore calls
    deleteKey = delete_key

    def num_keys(self) -> int:
        """Return the number of keys of all stores."""
        number: int = self._ask("count", [])
        return number

    # the name that PrefixStore calls
    getNumKeys = num_keys

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._ask("append", [key], [_bytes_of(value)])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys; wait until they have them."""
        values: list[bytes] = self._ask("get", keys)
        return values

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set keys."""
        self._ask("set", keys, [_bytes_of(value) for value in values])

    def has_extended_api(self) -> bool:
        """Return that `append`, `multi_get` and `multi_set` exist."""
        return True

    # the name that PrefixStore calls
    hasExtendedApi = has_extended_api

    def clone(self) -> LabStore:
        """Return a store with the same values."""
        return LabStore(self._link, self._prefix)


def _bytes_of(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
