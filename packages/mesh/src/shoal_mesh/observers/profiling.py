"""Collectives in profiles: a named range around each, with its mesh axes and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

from ..events import Event, observe, unobserve


@contextmanager
def annotate_collectives() -> Iterator[None]:
    """Give every collective inside the block a range `shoal::all_reduce[tp] 4096 B` in torch.profiler's traces.

    Example:
        >>> def example() -> list[str]:
        ...     with torch.profiler.profile(acc_events=True) as profile, annotate_collectives():
        ...         all_reduce(torch.ones(8), comm_over((0, 1)))
        ...     return [event.key for event in profile.key_averages() if event.key.startswith("shoal::")]
        >>> launch(example, 2)[0]
        ['shoal::all_reduce[ranks] 32 B']
    """
    ranges = _Ranges()
    observe(ranges)
    try:
        yield
    finally:
        unobserve(ranges)


class _Ranges:
    """The observer that opens a range before a collective and closes it after."""

    def __init__(self) -> None:
        self._open: dict[int, record_function] = {}

    def before(self, event: Event) -> None:
        name = f"shoal::{event.op}[{'x'.join(event.comm.axes)}] {event.nbytes} B"
        self._open[id(event)] = record_function(name)
        self._open[id(event)].__enter__()  # type: ignore[no-untyped-call]  # torch has no types here

    def after(self, event: Event) -> None:
        self._open.pop(id(event)).__exit__(None, None, None)
