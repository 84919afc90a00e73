"""Observers of collectives, and the events that they get before and after each collective.

CommDebugMode, `lockstep` and profiler annotations are observers. While none of them is on, the list
of observers is empty, and a collective costs nothing more. Observers are called once for each
collective, even if the collective calls the backend several times: calls inside of an observed
collective are not reported again (`in_observed`).

May import: _torch, argument_types, errors, transport, watch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch

from ._torch import is_compiling
from .argument_types import FUNCTION, kind_of, require
from .errors import CollectiveError, CollectiveTypeError
from .transport import Handle, Pending
from .watch.recorder import PURPOSES, Text

R = TypeVar("R")


# In lower case, like contextlib's `suppress`, because programs call it like a function.
class purpose:
    """Context manager that states the purpose of the collectives inside.

    Debug modes and errors repeat the purpose, and `lockstep` compares it between ranks. Use it for
    facts that the backend cannot see: the operator, the call of the user's program, placements
    before and after. Nested purposes are joined.

    Args:
        text: the purpose, or a function that returns it. The function runs only when an observer
            needs the text, so costly texts cost nothing otherwise.

    Raises:
        CollectiveTypeError: `text` is neither a string nor a function.

    Example:
        >>> with purpose("step 3"), purpose(lambda: "redistribute S(0) -> R"):
        ...     Event("all_reduce", None, ()).purpose
        'redistribute S(0) -> R; step 3'
    """

    __slots__ = ("_text",)

    def __init__(self, text: Text) -> None:
        # A string, the common case, costs one comparison and no union of types.
        if type(text) is not str:
            require(
                text,
                str | FUNCTION,
                "a purpose is a text, or a function that returns one",
                CollectiveTypeError,
            )
        self._text = text

    def __enter__(self) -> None:
        PURPOSES.set((*PURPOSES.get(), self._text))

    def __exit__(self, *_: object) -> None:
        texts = PURPOSES.get()
        if texts and texts[-1] is self._text:
            PURPOSES.set(texts[:-1])
            return
        # A block that began after this one is still open, as in a generator that waits at a
        # `yield`: remove this text from the middle.
        for position, text in enumerate(texts):
            if text is self._text:
                PURPOSES.set((*texts[:position], *texts[position + 1 :]))
                return


def _current_purpose() -> str:
    """Return the purposes of the enclosing blocks, innermost first."""
    texts = reversed(PURPOSES.get())
    return "; ".join([text if isinstance(text, str) else text() for text in texts])


@dataclass(slots=True)
class Event:
    """One collective, as the caller requested it.

    Attributes:
        op: name of the functional collective (`all_reduce`, `all_gather_into_tensor`, ...).
        comm: the communicator (a `Comm`).
        tensors: the tensors that this rank puts in.
        reduce_op: `sum`, ... or '' for collectives that only move data.
        same: values by name that must be the same on all ranks for the collective to be right, such
            as shapes, dims, sizes, the root.
        sends: the number of elements that this rank sends to each rank of the communicator, in its
            order. None if the values in `same` determine these numbers, as in an all-gather.
        receives: the number of elements that this rank receives from each rank, or None like
            `sends`.
        purpose: the purpose that the program states (`purpose`), innermost first; '' if it states
            none.
        started: seconds of `time.perf_counter`.
        seconds: duration on the host; 0.0 until the collective has returned.
        waits: begin and end of each wait of this rank, for a collective that was started with
            `async_op`; in seconds of `time.perf_counter`.
    """

    op: str
    comm: Any
    tensors: tuple[torch.Tensor, ...]
    reduce_op: str = ""
    same: Mapping[str, object] = field(default_factory=dict)
    sends: tuple[int, ...] | None = None
    receives: tuple[int, ...] | None = None
    purpose: str = field(default_factory=_current_purpose)
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The bytes that this rank puts in."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class Observer(Protocol):
    """An object that is called before a collective starts and after it has returned on the host."""

    def before(self, event: Event) -> None: ...

    def after(self, event: Event) -> None: ...


# Declared mutable state: the observers.
observers: list[Observer] = []
# Declared mutable state: ids of the threads whose calls of the backend are not reported. Either the
# thread runs a collective that was reported already, or it is in a block of `unobserved`.
_unreported_threads: set[int] = set()


def in_observed() -> bool:
    """Return whether backend calls that run now must not be reported to observers.

    Such calls belong to a collective that has been reported already or to a block of `unobserved`,
    or a compiler traces them. A traced call becomes an operator of `graph_operators`, which is
    reported when it runs.
    """
    return is_compiling() or threading.get_ident() in _unreported_threads


def is_observed() -> bool:
    """Return whether there is any observer; if not, layers above need not describe collectives.

    Example:
        >>> is_observed()
        False
    """
    return bool(observers)


def observe(observer: Observer) -> None:
    """Call `observer` before and after every collective from now on.

    Raises:
        CollectiveTypeError: `observer` lacks the method `before` or `after`.

    Example:
        >>> shown = SimpleNamespace(before=lambda event: print(event.op), after=lambda event: None)
        >>> observe(shown)
        >>> run_observed(lambda: 3, "all_reduce", SimpleNamespace(size=2), ())
        all_reduce
        3
        >>> unobserve(shown)
    """
    for name in ("before", "after"):
        if not callable(getattr(observer, name, None)):
            raise CollectiveTypeError(
                f"an observer has methods before(event) and after(event), got {kind_of(observer)}"
            )
    observers.append(observer)


def unobserve(observer: Observer) -> None:
    """Stop calling `observer`.

    Raises:
        CollectiveError: `observer` was not passed to `observe`, or is removed already.
    """
    if observer not in observers:
        raise CollectiveError(
            f"{observer!r:.80} does not observe collectives: pass the object that was passed to "
            "observe()"
        )
    observers.remove(observer)


@contextmanager
def observing(
    before: Callable[[Event], object] = lambda _: None,
    after: Callable[[Event], object] = lambda _: None,
) -> Iterator[None]:
    """Call two functions before and after every collective inside the block."""
    observer = SimpleNamespace(before=before, after=after)
    observe(observer)
    try:
        yield
    finally:
        unobserve(observer)


@contextmanager
def unobserved() -> Iterator[None]:
    """Hide the collectives of this thread from observers inside the block.

    Simulated ranks use it, because they send nothing.

    Example:
        >>> shown = SimpleNamespace(before=lambda event: print(event.op), after=lambda event: None)
        >>> observe(shown)
        >>> with unobserved():
        ...     run_observed(lambda: 3, "all_reduce", SimpleNamespace(size=2), ())
        3
        >>> unobserve(shown)
    """
    thread = threading.get_ident()
    was_unreported = thread in _unreported_threads
    _unreported_threads.add(thread)
    try:
        yield
    finally:
        if not was_unreported:
            _unreported_threads.discard(thread)


class _TimedHandle:
    """The handle of a collective in flight; it records the begin and the end of each wait."""

    def __init__(self, work: Handle, waits: list[tuple[float, float]]) -> None:
        self._work = work
        self._waits = waits
        self.is_completed = work.is_completed

    def wait(self) -> None:
        begin = time.perf_counter()
        self._work.wait()
        self._waits.append((begin, time.perf_counter()))


def run_observed(  # noqa: PLR0913  # the fields of an event
    run: Callable[[], R],
    op: str,
    comm: Any,
    tensors: Sequence[torch.Tensor],
    reduce_op: str = "",
    same: Mapping[str, object] = MappingProxyType({}),
    flow: tuple[Sequence[int], Sequence[int]] | None = None,
) -> R:
    """Run a collective with reports to observers, and return its result.

    A collective over one rank, or inside of another observed collective, is not reported.

    Args:
        run: runs the collective.
        op: as in `Event`.
        comm: as in `Event`.
        tensors: as in `Event`.
        reduce_op: as in `Event`.
        same: as in `Event`, where sequences become tuples.
        flow: the pair of `sends` and `receives` of the `Event`.
    """
    if not observers or comm.size == 1 or in_observed():
        return run()
    same_values: dict[str, object] = {}
    for name, value in same.items():
        same_values[name] = value
        if isinstance(value, Sequence) and not isinstance(value, str):
            same_values[name] = tuple(value)
    event = Event(op, comm, tuple(tensors), reduce_op, same=same_values)
    if flow is not None:
        sends, receives = flow
        event.sends = tuple(sends)
        event.receives = tuple(receives)
    for observer in observers:
        observer.before(event)
    thread = threading.get_ident()
    _unreported_threads.add(thread)
    try:
        result = run()
        # A collective that was started with `async_op` returns a `Pending`: time its waits too.
        if isinstance(result, Pending) and result.work is not None:
            result.work = _TimedHandle(result.work, event.waits)
        return result
    finally:
        _unreported_threads.discard(thread)
        event.seconds = time.perf_counter() - event.started
        for observer in observers:
            observer.after(event)
