"""Collectives in profiles: a named range around each, with its mesh axes and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

from .observe import Event, observe, unobserve

__all__ = ["annotate_collectives"]


@contextmanager
def annotate_collectives() -> Iterator[None]:
    """Give every collective inside the block a range `shoal::all_reduce[tp] 4096 B` in torch.profiler's traces."""
    ranges = _Ranges()
    observe(ranges)
    try:
        yield
    finally:
        unobserve(ranges)


class _Ranges:
    def __init__(self) -> None:
        self._open: dict[int, record_function] = {}

    def before(self, event: Event) -> None:
        name = f"shoal::{event.op}[{'x'.join(event.comm.axes)}] {event.nbytes} B"
        self._open[id(event)] = record_function(name)
        self._open[id(event)].__enter__()  # type: ignore[no-untyped-call]  # torch has no types here

    def after(self, event: Event) -> None:
        self._open.pop(id(event)).__exit__(None, None, None)
