"""Processes that need nothing of each other, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def two_at_a_time(
    start: Callable[..., T], cases: Iterable[tuple[Any, ...]]
) -> dict[Any, Future[T]]:
    """What a function that starts a process and waits for it returns or raises.

    The outcomes are by the first argument of each call.
    """
    with ThreadPoolExecutor(2) as threads:
        return {case[0]: threads.submit(start, *case) for case in cases}
