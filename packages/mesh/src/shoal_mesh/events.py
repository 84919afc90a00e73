"""Observers of collectives, and the events that they get before and after each collective.

CommDebugMode, `lockstep` and profiler annotations are observers. The list of observers is empty
unless one of them is on. Observers are called once for each collective, however many calls of the
backend it takes: calls inside of an observed collective are not reported again (`in_observed`).

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
from .transport import Handle
from .watch.recorder import PURPOSES, Text

R = TypeVar("R")


# lower case because programs call it like a function, as they do contextlib's suppress
class purpose:
    """Context manager that states the purpose of the collectives inside.

    Debug modes and errors repeat the purpose, and `lockstep` compares it between ranks. Use it for
    facts that the backend cannot see: the operator, the call of the user's program, placements
    before and after. Nested purposes are joined.

    Args:
        text: the purpose, or a function that returns it. The function runs only when an observer
            needs the text, so costly texts cost nothing otherwise.

    Raises:
        CollectiveTypeError: `text` is neither.

    Example:
        >>> with purpose("step 3"), purpose(lambda: "redistribute S(0) -> R"):
        ...     Event("all_reduce", None, ()).purpose
        'redistribute S(0) -> R; step 3'
    """

    __slots__ = ("_text",)

    def __init__(self, text: Text) -> None:
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
        # a block around this one has ended first: remove this text from the middle
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
        same: values by name that must be equal on all ranks for the collective to be right, such as
            shapes, dims, sizes, the root.
        sends: the numbers of elements for each rank of the communicator, in its order, if ranks
            send different amounts; None if the values in `same` determine these numbers.
        receives: the numbers of elements from each rank; None in the same case as `sends`.
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


# Declared mutable state: the observers, and the threads that run a collective that was reported to
# observers already.
observers: list[Observer] = []
_inside: set[int] = set()


def in_observed() -> bool:
    """Return whether backend calls that run now must not be reported to observers.

    Such calls belong to a collective that has been reported already, or a compiler traces them. A
    traced call becomes an operator of `graph_operators`, which is reported when it runs.
    """
    return is_compiling() or threading.get_ident() in _inside


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
        CollectiveTypeError: it has no methods `before` and `after`.

    Example:
        >>> names = SimpleNamespace(before=lambda event: print(event.op), after=lambda event: None)
        >>> observe(names)
        >>> observed(lambda: 3, "all_reduce", SimpleNamespace(size=2), ())
        all_reduce
        3
        >>> unobserve(names)
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
        CollectiveError: it does not observe.
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
        >>> names = SimpleNamespace(before=lambda event: print(event.op), after=lambda event: None)
        >>> observe(names)
        >>> with unobserved():
        ...     observed(lambda: 3, "all_reduce", SimpleNamespace(size=2), ())
        3
        >>> unobserve(names)
    """
    thread = threading.get_ident()
    was_inside = thread in _inside
    _inside.add(thread)
    try:
        yield
    finally:
        if not was_inside:
            _inside.discard(thread)


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


def observed(  # noqa: PLR0913  # the fields of an event
    run: Callable[[], R],
    op: str,
    comm: Any,
    tensors: Sequence[torch.Tensor],
    reduce_op: str = "",
    same: Mapping[str, object] = MappingProxyType({}),
    flow: tuple[Sequence[int], Sequence[int]] | None = None,
) -> R:
    """Run a collective with reports to observers, and return its result.

    A collective over one rank, or inside of another observed collective, is not reported. `run`
    runs the collective. The other arguments are fields of the `Event`: `flow` is its `sends` and
    `receives`, and sequences in `same` become tuples.
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
    _inside.add(thread)
    try:
        result = run()
        # the result is the `Pending` of a collective in flight
        if hasattr(result, "work") and result.work is not None:
            result.work = _TimedHandle(result.work, event.waits)
        return result
    finally:
        _inside.discard(thread)
        event.seconds = time.perf_counter() - event.started
        for observer in observers:
            observer.after(event)
