"""Collectives as numbers that ranks compare, and a record of the last ones of this process.

The recorder is always on: an entry takes about a fifth of a microsecond. When a rank is lost, the
other ranks write files; `python -m shoal_mesh postmortem` reads the files of all ranks.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "broadcast",
    "all_reduce_by_parts",
)
# First the ops that shared memory carries, then the ops that only backends have.
OPS = ("", "sum", "min", "max", "product", "avg", "band", "bor", "bxor")
CARRIED_OPS = frozenset(OPS[:6])
DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_OTHER_DTYPE = 31
CARRIED_DTYPES = frozenset(DTYPES[:8])
# Packages whose frames do not belong to the program, by whole names: a program may be in
# `shoal_experiments`.
# A package of shoal, of whatever name, and torch.
LIBRARIES = r"(shoal_\w+|torch)"
SWITCH = "SHOAL_POSTMORTEM"  # the folder of the files; "0" for none
Text = str | Callable[[], str]
# The purposes of a collective, as the program states them with `purpose`, innermost last.
PURPOSES: ContextVar[tuple[Text, ...]] = ContextVar("shoal_mesh_purposes", default=())
# Declared mutable state: time, group, what (a request, or the arguments of one to a backend) and
# purposes. A shorter entry is a note.
ENTRIES: deque[tuple[float, str, Any, tuple[Text, ...]] | tuple[str, int]] = deque(maxlen=512)

_append = ENTRIES.append
_now = time.monotonic
_purposes = PURPOSES.get


@lru_cache(maxsize=4096)
def request(kind: str, dtype: torch.dtype, count: int, op: str = "", root: int = 0) -> int:
    """Return the number of a collective: `count` elements of a dtype.

    They are reduced with `op`, or sent from the group's rank `root`. All dtypes without their own
    number share one. Ranks do not know a common count of uneven blocks.
    """
    number = number_of(dtype)
    # 38 bits of the count, 12 of the root, 4 of the reduction, 3 of the kind, 5 of the dtype
    return (((count * 4096 + root) * 16 + OPS.index(op)) * 8 + KINDS.index(kind)) * 32 + number


def describe(number: int) -> str:
    """Describe a number that `request` returned."""
    number, dtype = divmod(number, 32)
    number, kind = divmod(number, 8)
    number, op = divmod(number, 16)
    count, root = divmod(number, 4096)
    return _in_words(KINDS[kind], name_of(dtype), count, OPS[op], root=root)


def number_of(dtype: torch.dtype) -> int:
    """Return a number that ranks compare; all dtypes without their own number share one."""
    return DTYPES.index(dtype) if dtype in DTYPES else _OTHER_DTYPE


def name_of(number: int) -> str:
    """Return the dtype of a number, in words."""
    return "another dtype" if number == _OTHER_DTYPE else str(DTYPES[number])


def _in_words(kind: str, dtype: object, count: int, op: str, root: int) -> str:
    extra = ""
    if op:
        extra = f" {op}"
    elif kind == "broadcast":
        extra = f" from {root}"
    how_many = "any number" if kind == "all_to_all_v" else count
    return f"{kind}{extra} of {how_many} x {str(dtype).removeprefix('torch.')}"


def note(said: tuple[str, int]) -> None:
    """Record the purpose of the next collectives of this process.

    It is cheaper than `purpose`, for the recorder alone.

    Args:
        said: the purpose, and how many collectives it has at least.

    Example:
        >>> note(("redistribute S(0) -> R", 1))
    """
    _append(said)


def record(group: str, what: Any) -> None:
    """Record that a collective starts."""
    _append((_now(), group, what, _purposes()))


def current_purpose() -> str:
    """Return the purpose of the last collective of this process; '' if it has none."""
    *_, (_, _, _, texts) = [("", "", "", ()), *_with_notes()]
    return _joined(texts)


def last_of_backend(group: str) -> str:
    """Describe the last call of a group's backend; 'nothing' if it is no longer known."""
    for entry in reversed(ENTRIES):
        if entry[1] == group and isinstance(entry[2], tuple):
            return _in_words(*entry[2])
    return "nothing"


def folder() -> str:
    """Return the folder of this process's file; '' if it writes none.

    Ranks of one launcher have one folder.
    """
    chosen = os.environ.get(SWITCH, "")
    if chosen:
        return "" if chosen == "0" else chosen
    from tempfile import gettempdir

    return os.path.join(gettempdir(), f"shoal_postmortem_{os.getuid()}_{os.getppid()}")


def dump(rank: int, error: str, culprits: Sequence[int], seen: Mapping[int, str]) -> str:
    """Write the last collectives of this rank, those seen of other ranks, and its error to a file.

    Returns a hint how to read the file, to be added to the error; '' if nothing was written.
    """
    path = folder()
    now = time.monotonic()
    if not path:
        return ""
    import json
    import socket
    import traceback

    import torch.distributed as dist

    collectives = []
    for at, group, what, texts in _with_notes():
        text = describe(what) if isinstance(what, int) else _in_words(*what)
        collectives.append((round(now - at, 3), group, text, _joined(texts)))
    stack = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack()]
    written = {
        "rank": rank,
        "world": dist.get_world_size() if dist.is_initialized() else rank + 1,
        "error": error,
        "culprits": culprits,
        "seen": seen,
        "process": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
        "collectives": collectives,
        "stack": stack,
    }
    with suppress(OSError):
        os.makedirs(path, mode=0o700, exist_ok=True)
        # a name in a shared folder may be somebody else's
        if os.stat(path).st_uid != os.getuid():
            return ""
        complete = os.path.join(path, f"rank{rank}.json")
        partial = f"{complete}.part"
        with open(partial, "w") as file:
            json.dump(written, file)
        os.replace(partial, complete)
        package = __package__.partition(".")[0]
        return (
            f" (to list the last collectives of all ranks: python -m {package} postmortem {path})"
        )
    return ""


def _with_notes() -> Iterator[tuple[float, str, Any, tuple[Text, ...]]]:
    """Return the collectives, each with the note that it belongs to."""
    said = ""
    left = 0
    for entry in [*ENTRIES]:
        if len(entry) == 2:
            said, left = entry
            continue
        at, group, what, texts = entry
        if left > 0:
            texts = (*texts, said)
        yield at, group, what, texts
        left -= 1


def _joined(texts: tuple[Text, ...]) -> str:
    """Join the texts of a collective's purpose."""
    purposes = []
    for text in reversed(texts):
        # a text of the program's own, which is asked late
        with suppress(Exception):
            purposes.append(text if isinstance(text, str) else text())
    return "; ".join(purposes)
