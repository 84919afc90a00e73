"""A progress bar for work on a model that may take long."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def progress(items: Iterable[T], title: str) -> Iterable[T]:
    """The items, with a bar on standard error that says how far they are.

    It appears after two seconds, on the first rank, where standard error is a terminal, and is removed at the end. Logs
    get nothing.

    Example:
        >>> sum(progress([1, 2, 3], "adding"))
        6
    """
    if not sys.stderr.isatty() or (dist.is_initialized() and dist.get_rank() != 0):
        return items
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, title, delay=2, leave=False)
    return bar
