"""What the parent sends to its ranks and what they send back, as values."""

from __future__ import annotations

from typing import Any

from ..values import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One call, sent to all ranks.

    Attributes:
        function: pickled, by name or as code (`dump_function`).
        payload: pickled (args, kwargs), read when there is a default group.
        state: attributes of the test instance when the function is a method, None otherwise.
        path: `sys.path` of the parent.
        argv: `sys.argv` of the parent.
        cwd: working directory of the parent.
        store: port of the parent's store, and a prefix that no other job has.
        backend: of the default group.
        last: whether a rank ends when it has answered.
    """

    function: bytes
    payload: bytes
    state: dict[str, Any] | None
    path: list[str]
    argv: list[str]
    cwd: str
    store: tuple[int, str]
    backend: str
    last: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on one rank.

    Attributes:
        kind: name of the exception's type.
        message: its text.
        trace: the formatted traceback, with the locals of the failing function.
        skip: whether it asked to skip the test.
        error: the pickled exception, None when it cannot be pickled.
    """

    kind: str
    message: str
    trace: str
    skip: bool = False
    error: bytes | None = None
