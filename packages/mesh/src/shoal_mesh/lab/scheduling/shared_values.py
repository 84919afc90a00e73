"""The values of all stores of a lab, and the requests of ranks to them."""

from __future__ import annotations

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


class SharedValues:
    """Keys and values that all ranks share."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def can_answer(self, request: StoreRequest) -> bool:
        """Return whether a request has an answer now; `get` and `wait` need their keys.

        Args:
            request: the request.
        """
        if request.op not in {"get", "wait"}:
            return True
        return all(key in self._values for key in request.keys)

    def answer(self, request: StoreRequest) -> Any:
        """Carry out a request and return its result.

        Args:
            request: a request that has an answer.
        """
        values = self._values
        keys = request.keys
        match request.op:
            case "set":
                values.update(zip(keys, request.values, strict=True))
            case "get":
                return [values[key] for key in keys]
            case "add":
                total = int(values.get(keys[0], b"0")) + request.values[0]
                values[keys[0]] = str(total).encode()
                return total
            case "check":
                return all(key in values for key in keys)
            case "compare_set":
                return self._compare_set(keys[0], *request.values)
            case "delete":
                return values.pop(keys[0], None) is not None
            case "count":
                return len(values)
            case "append":
                values[keys[0]] = values.get(keys[0], b"") + request.values[0]
        return None

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key that has the expected value, or that is absent and expected to be empty."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._values[key] = desired
            return desired
        return expected if present is None else present
