"""Who is told about collectives: a list that is empty unless someone looks.

CommDebugMode, `lockstep` and profiler annotations are observers. A collective tells them once, however many kernels it
takes; kernels that run inside of it are not told again (`inside_told`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["Event", "Observer", "inside_told", "observe", "observed", "observers", "purpose", "unobserve"]

R = TypeVar("R")
_purposes: ContextVar[tuple[str, ...]] = ContextVar("shoal_mesh_purposes", default=())


@contextmanager
def purpose(text: str) -> Iterator[None]:
    """Say what the collectives inside are for; debug modes and errors repeat it."""
    token = _purposes.set((*_purposes.get(), text))
    try:
        yield
    finally:
        _purposes.reset(token)


@dataclass(slots=True)
class Event:
    """One collective, as a whole.

    Attributes:
        op: name of the functional collective (`all_reduce`, `all_gather_into_tensor`, ...).
        comm: the communicator (a `Comm`).
        tensors: what this rank put in.
        reduce_op: `sum`, ... or '' for collectives that only move data.
        purpose: what the program says it is doing (`purpose`), innermost first; '' when it says nothing.
        started: seconds of `time.perf_counter`.
        seconds: duration on the host; 0.0 until the collective has returned.
    """

    op: str
    comm: Any
    tensors: tuple[torch.Tensor, ...]
    reduce_op: str = ""
    purpose: str = field(default_factory=lambda: "; ".join(reversed(_purposes.get())))
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that this rank put in."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


class Observer(Protocol):
    """Something that is told before a collective starts and after it has returned on the host."""

    def before(self, event: Event) -> None: ...

    def after(self, event: Event) -> None: ...


class _Inside(threading.local):
    """Whether this thread is inside of a collective that observers have been told of."""

    told = False


# Declared mutable state: who looks, and whether a told collective is under way.
observers: list[Observer] = []
_inside = _Inside()


def inside_told() -> bool:
    """Whether kernels that run now belong to a collective that observers know of already."""
    return _inside.told


def observe(observer: Observer) -> None:
    """Tell `observer` of every collective from now on."""
    observers.append(observer)


def unobserve(observer: Observer) -> None:
    """Tell `observer` no more."""
    observers.remove(observer)


def observed(event: Event, run: Callable[[], R]) -> R:
    """What `run` returns, with every observer told before and after, and nothing told in between."""
    for observer in observers:
        observer.before(event)
    _inside.told = True
    try:
        return run()
    finally:
        _inside.told = False
        event.seconds = time.perf_counter() - event.started
        for observer in observers:
            observer.after(event)
