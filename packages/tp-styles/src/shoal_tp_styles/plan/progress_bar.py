"""Progress bar for loops over modules or files that may take seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def progress(items: Iterable[T], title: str) -> Iterable[T]:
    """Return the items, wrapped in a progress bar on standard error.

    The bar appears after two seconds, on the first rank, if standard error is a terminal, and is
    removed at the end. Nothing is written to logs.

    Example:
        >>> sum(progress([1, 2, 3], "adding"))
        6
    """
    is_other_rank = dist.is_initialized() and dist.get_rank() != 0
    if is_other_rank or not sys.stderr.isatty():
        return items
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, title, delay=2, leave=False)
    return bar
