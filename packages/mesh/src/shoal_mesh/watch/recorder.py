"""Record of the last collectives, and numbers by which ranks compare their collectives.

The recorder is always on: an entry takes about a fifth of a microsecond. When a rank is lost, the
other ranks write files; `python -m shoal_mesh postmortem` reads the files of all ranks.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..errors import CollectiveError

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "broadcast",
    "all_reduce_by_parts",
)
# The reductions. The transport through shared memory can run the first six, from "" (no reduction)
# to "avg"; the others need a backend of torch.
OPS = ("", "sum", "min", "max", "product", "avg", "band", "bor", "bxor")
CARRIED_OPS = frozenset(OPS[:6])
DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64,
    torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
# the largest number in 5 bits
_OTHER_DTYPE = 31
# the dtypes that shared memory can reduce
CARRIED_DTYPES = frozenset(DTYPES[:8])
# The packages of shoal, and torch, as a regular expression. A report names the line of the program
# that made a call, so it leaves out the frames of these packages.
LIBRARIES = r"(shoal_\w+|torch)"
# The environment variable with the folder of the files that are written when a rank is lost; "0"
# means that none are written.
SWITCH = "SHOAL_POSTMORTEM"
Text = str | Callable[[], str]
# The purposes of a collective, as the program states them with `purpose`, innermost last.
PURPOSES: ContextVar[tuple[Text, ...]] = ContextVar("shoal_mesh_purposes", default=())


class _Entry(NamedTuple):
    """The record of one collective.

    Attributes:
        started: when the collective started, in seconds of `time.monotonic`.
        group: the name of its group.
        call: its number (`request`) if shared memory runs it; for a backend the tuple of kind,
            dtype, count, op and root.
        purposes: its purposes, innermost last.
    """

    started: float
    group: str
    call: Any
    purposes: tuple[Text, ...]


# The last collectives and notes: the mutable state of this file. A collective is a plain tuple of
# the fields of `_Entry`, because a plain tuple takes a quarter of the time to make. A pair of a
# purpose and a number was recorded by `note`.
ENTRIES: deque[tuple[float, str, Any, tuple[Text, ...]] | tuple[str, int]] = deque(maxlen=512)

_append = ENTRIES.append
_now = time.monotonic
_purposes = PURPOSES.get


@lru_cache(maxsize=4096)
def request(kind: str, dtype: torch.dtype, count: int, op: str = "", root: int = 0) -> int:
    """Return the number of a collective, which ranks compare.

    Args:
        kind: one of `KINDS`.
        dtype: the dtype; all dtypes that are not in `DTYPES` share one number.
        count: the number of elements; 0 for uneven blocks, because ranks have different counts.
        op: the reduction; '' for a collective that only moves data.
        root: the rank in the group that sends a broadcast.

    Raises:
        CollectiveError: `torch.jit.trace` records the call.
    """
    refuse_recorded(count)
    # 38 bits of the count, 12 of the root, 4 of the reduction, 3 of the kind, 5 of the dtype
    number = count * 4096 + root
    number = number * 16 + OPS.index(op)
    number = number * 8 + KINDS.index(kind)
    return number * 32 + number_of(dtype)


def refuse_recorded(count: object) -> None:
    """Raise CollectiveError if a count is a tensor, as it is while `torch.jit.trace` records.

    A recorded graph would have the values that arrive now as constants.
    """
    if type(count) is torch.Tensor:
        raise CollectiveError(
            "torch.jit.trace cannot record collectives: use torch.export.export or torch.compile, "
            "or trace a module that runs without communication"
        )


def describe(number: int) -> str:
    """Describe a number that `request` returned.

    Example:
        >>> describe(request("all_reduce", torch.float32, 6, "sum"))
        'all_reduce sum of 6 x float32'
    """
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
    """Describe a collective in words."""
    extra = ""
    if op:
        extra = f" {op}"
    elif kind == "broadcast":
        extra = f" from {root}"
    how_many = "any number" if kind == "all_to_all_v" else count
    name = str(dtype).removeprefix("torch.")
    return f"{kind}{extra} of {how_many} x {name}"


def number_of_text(text: str) -> int:
    """Return a number that is the same for equal texts, in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    # never 0, which stands for no text
    return int.from_bytes(digest, "little") + 1


def note(purpose: tuple[str, int]) -> None:
    """Record the purpose of the next collectives of this process.

    A note is cheaper than a block of `purpose`, but only the recorder has it.

    Args:
        purpose: the purpose, and the number of the next collectives that get it. If more
            collectives may serve the purpose, it is the least number that surely do.

    Example:
        >>> note(("redistribute S(0) -> R", 1))
    """
    _append(purpose)


def record(group: str, call: Any) -> None:
    """Record that a collective starts."""
    _append((_now(), group, call, _purposes()))


def current_purpose() -> str:
    """Return the purpose of the last collective of this process; '' if it has none."""
    entries = list(_with_notes())
    return _join(entries[-1].purposes) if entries else ""


def last_of_backend(group: str) -> str:
    """Describe the last call of a group's backend; 'nothing' if it is no longer known."""
    for entry in reversed(ENTRIES):
        # a note
        if len(entry) == 2:
            continue
        _, group_of_entry, call, _ = entry
        # a tuple is a call of a backend
        if group_of_entry == group and isinstance(call, tuple):
            return _in_words(*call)
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
    """Write the last collectives of this rank, and the error with which it fails, to a file.

    Args:
        rank: the global rank.
        error: the text of the error.
        culprits: the global ranks at fault.
        seen: global rank -> description of its last collective, as far as this rank can observe.

    Returns:
        A hint how to read the file, to be added to the error; '' if nothing was written.
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
    for entry in _with_notes():
        call = entry.call
        text = describe(call) if isinstance(call, int) else _in_words(*call)
        seconds = round(now - entry.started, 3)
        collectives.append((seconds, entry.group, text, _join(entry.purposes)))
    frames = traceback.extract_stack()
    stack = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    # Without a default group the number of ranks is unknown; it is at least `rank + 1`.
    world = dist.get_world_size() if dist.is_initialized() else rank + 1
    content = {
        "rank": rank,
        "world": world,
        "error": error,
        "culprits": culprits,
        "seen": seen,
        "process": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
        "collectives": collectives,
        "stack": stack,
    }
    # If the file cannot be written, the block ends early, and there is no hint.
    with suppress(OSError):
        os.makedirs(path, mode=0o700, exist_ok=True)
        # the folder is in a folder of all users, so another user may own it
        if os.stat(path).st_uid != os.getuid():
            return ""
        complete = os.path.join(path, f"rank{rank}.json")
        partial = f"{complete}.part"
        with open(partial, "w") as file:
            json.dump(content, file)
        os.replace(partial, complete)
        package = __package__.partition(".")[0]
        return (
            f" (to list the last collectives of all ranks: python -m {package} postmortem {path})"
        )
    return ""


def _with_notes() -> Iterator[_Entry]:
    """Yield the collectives; add the last note to the purposes of those that it covers."""
    noted = ""
    remaining = 0
    for entry in [*ENTRIES]:
        if len(entry) == 2:
            noted, remaining = entry
            continue
        collective = _Entry(*entry)
        if remaining > 0:
            collective = collective._replace(purposes=(*collective.purposes, noted))
        yield collective
        remaining -= 1


def _join(texts: tuple[Text, ...]) -> str:
    """Join the texts of a collective's purpose."""
    purposes = []
    for text in reversed(texts):
        # a function of the program, which is called late, may raise
        with suppress(Exception):
            purposes.append(text if isinstance(text, str) else text())
    return "; ".join(purposes)
