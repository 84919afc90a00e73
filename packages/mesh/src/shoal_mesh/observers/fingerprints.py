"""What a rank is about to do: as numbers, which must agree between ranks, and as a line for people."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import FrameType

from ..events import Event
from ..shared_memory.recorder import LIBRARIES

Numbers = tuple[int, int, int]

_MODULUS = (1 << 61) - 1  # numbers are below it, so that they are signed 64-bit integers to any backend
_FACTOR = 0x9E3779B97F4A7C15  # odd and irregular: the pairs of ranks get unlike weights
_STACK = 16  # file and line of eight frames: enough to tell two calls of one function apart
_LIBRARY = re.compile(rf"(^|\.){LIBRARIES}(\.|$)")


def statement(event: Event, *, call_sites: bool) -> tuple[Numbers, str]:
    """What a rank is about to do.

    Args:
        event: the collective.
        call_sites: whether the lines of the program count.

    Returns:
        Three numbers, for `agree`, and a line: `all_reduce sum float32 shape (2,), for step 3 (train.py:80)`.
    """
    dtypes = tuple([t.dtype for t in event.tensors])
    given = event.op, event.reduce_op, tuple(event.same.items()), dtypes, event.purpose, (_call_stack(), call_sites)
    try:
        said, kinds, line = _stated(*given)
    except TypeError:  # a value that cannot be hashed, such as a list of sizes
        said, kinds, line = _stated.__wrapped__(*given)
    if event.sends is None or event.receives is None:
        return (said, kinds, 0), line
    rank, size, flow = event.comm.rank, event.comm.size, 0
    for other, (sent, expected) in enumerate(zip(event.sends, event.receives, strict=True)):
        flow += _weight(rank * size + other) * sent - _weight(other * size + rank) * expected
    line = f"sends {list(event.sends)}, receives {list(event.receives)}: {line}"
    return (said, kinds, flow % _MODULUS), line


@lru_cache(maxsize=4096)
def _stated(
    op: str,
    reduce_op: str,
    same: tuple[tuple[str, object], ...],
    dtypes: tuple[object, ...],
    purpose: str,
    where: tuple[tuple[str | int, ...], bool],
) -> tuple[int, int, str]:
    """The number of what all ranks do alike, that of the dtypes, and the line: a loop states the same ones again."""
    stack, call_sites = where
    lines = [f"{os.path.basename(str(path))}:{line}" for path, line in zip(stack[::2], stack[1::2], strict=True)]
    at, names = " < ".join(lines), [str(dtype).removeprefix("torch.") for dtype in dtypes]
    sizes = ", ".join([f"{name} {value}" for name, value in same])
    words = " ".join([word for word in (op, reduce_op, *sorted(set(names)), sizes) if word])
    to_what_end = f", for {purpose}" if purpose else ""
    # A rank that neither sends nor receives a block does not know the dtype of the others.
    kinds = _number_of(",".join(names)) if names else 0
    said = _number_of(f"{op}|{reduce_op}|{sizes}|{purpose}|{at if call_sites else ''}")
    return said, kinds, f"{words}{to_what_end} ({at})"


def agree(rows: Sequence[Numbers]) -> bool:
    """Whether what ranks say fits together."""
    said, kinds, flows = zip(*rows, strict=True)
    return len(set(said)) == 1 and len({*kinds} - {0}) <= 1 and sum(flows) % _MODULUS == 0


def as_lines(texts: Mapping[int, str]) -> str:
    """The lines of an error: what ranks do, those together that do the same."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        by_text.setdefault(text, []).append(rank)
    return "\n".join(f"  rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}: {t}" for t, r in by_text.items())


def _number_of(text: str) -> int:
    """A number that equal texts have in common, in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") + 1


@lru_cache(maxsize=4096)
def _weight(pair: int) -> int:
    return pow(_FACTOR, pair + 1, _MODULUS)


def line_of_program() -> str:
    """Where the program is: `train.py:80`, the innermost line that is neither ours nor torch's; '' if there is none."""
    stack = _call_stack(2)
    return f"{os.path.basename(str(stack[0]))}:{stack[1]}" if stack else ""


def _call_stack(length: int = _STACK) -> tuple[str | int, ...]:
    """File and line of the innermost frames of the program that are neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(2)
    stack: list[str | int] = []
    while frame is not None and len(stack) < length:
        if not _is_library(frame.f_globals.get("__name__", "")):
            stack += frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return tuple(stack)


@lru_cache(maxsize=4096)
def _is_library(module: str) -> bool:
    return _LIBRARY.search(module) is not None
