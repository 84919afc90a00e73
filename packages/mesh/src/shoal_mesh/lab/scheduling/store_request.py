"""`StoreRequest`: a request of a rank to the stores of a lab, which share their keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .posted_calls import Frame


class StoreRequest(NamedTuple):
    """A request of a rank to the stores.

    Attributes:
        op: `set`, `get`, `add`, `check`, `wait`, `compare_set`, `delete`, `count` or `append`.
        keys: the keys.
        values: for `set`, the values; the number that `add` adds; both values of `compare_set`.
        expires: whether a request that cannot be answered raises when all ranks wait.
        frames: the innermost lines of the program.
    """

    op: str
    keys: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    expires: bool = False
    frames: tuple[Frame, ...] = ()

    @property
    def text(self) -> str:
        """The request in words."""
        return f"{self.op} of {', '.join(map(repr, self.keys))} in a store"

    def has_answer(self, stored: Mapping[str, bytes]) -> bool:
        """Return whether the request can be carried out now; `get` and `wait` need their keys.

        Args:
            stored: the values of all stores, by key.
        """
        if self.op not in {"get", "wait"}:
            return True
        return all(key in stored for key in self.keys)

    def carry_out(self, stored: dict[str, bytes]) -> Any:
        """Read or change the stored values, and return the result.

        Args:
            stored: the values of all stores, by key; the request has an answer.
        """
        keys = self.keys
        match self.op:
            case "set":
                stored.update(zip(keys, self.values, strict=True))
            case "get":
                return [stored[key] for key in keys]
            case "add":
                total = int(stored.get(keys[0], b"0")) + self.values[0]
                stored[keys[0]] = str(total).encode()
                return total
            case "check":
                return all(key in stored for key in keys)
            case "compare_set":
                return _compare_set(stored, keys[0], *self.values)
            case "delete":
                return stored.pop(keys[0], None) is not None
            case "count":
                return len(stored)
            case "append":
                stored[keys[0]] = stored.get(keys[0], b"") + self.values[0]
        return None


def _compare_set(stored: dict[str, bytes], key: str, expected: bytes, desired: bytes) -> bytes:
    """Set a key that has the expected value, or that is absent and expected to be empty."""
    present = stored.get(key)
    if present == expected or (present is None and not expected):
        stored[key] = desired
        return desired
    return expected if present is None else present
