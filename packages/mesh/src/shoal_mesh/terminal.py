"""A line of progress on a terminal, for work that takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
_QUIET = 2.0  # seconds without a line: short work shows none
_EVERY = 0.1


def progress(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """The items, with a line on standard error that says how far they are.

    The line appears after two seconds, on the first rank, where standard error is a terminal, and is removed at the
    end. Logs get nothing.

    Args:
        items: what is worked on.
        title: what is done to them.
        total: how many there are; by default `len(items)`, if they have a length.

    Example:
        >>> sum(progress([1, 2, 3], "adding"))
        6
    """
    stream = sys.stderr
    if not stream.isatty() or (dist.is_initialized() and dist.get_rank() != 0):
        yield from items
        return
    count = total if total is not None else len(items) if isinstance(items, Sized) else None
    began = time.monotonic()
    due, shown = began + _QUIET, False
    try:
        for done, item in enumerate(items):
            now = time.monotonic()
            if now >= due:
                rest = "" if count is None or not done else f", {(count - done) * (now - began) / done:.0f} s left"
                stream.write(f"\r\x1b[K{title}: {done}{'' if count is None else f' of {count}'}{rest}")
                stream.flush()
                due, shown = now + _EVERY, True
            yield item
    finally:
        if shown:
            stream.write("\r\x1b[K")
            stream.flush()
