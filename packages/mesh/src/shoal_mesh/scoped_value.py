"""Values that hold inside a `with` block, separate for each thread and each asyncio task.

A `ScopedValue` is like a context variable, except that autograd's threads read the value of the
thread that called `backward`.

May import: _torch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ._torch import set_thread_object, thread_object

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class OpenBlock(Generic[T]):
    """A block that is open in some context.

    Attributes:
        change: computes the value inside the block from the value outside.
        outside: the value outside.
        task: the thread and the asyncio task that opened the block.
        inherited: the object (thread, value) of the thread that called `backward`, if the block was
            opened on a thread of autograd during that backward pass; None otherwise.
        is_closed: whether the block has ended in a context other than the one that opened it.
    """

    change: Callable[[T], T]
    outside: T
    task: tuple[int, object]
    inherited: Any
    is_closed: bool = False


class _LastStashed(threading.local):
    """The value that this thread stored last for the backward passes that it starts."""

    value: object = None


class ScopedValue(Generic[T]):
    """A value that nested blocks set, separate for each thread and task.

    A backward pass inherits the value. A block that ends undoes its own change, whichever blocks
    have ended before. A task that is started in a block keeps the value, as with any context
    variable.

    Autograd may run a backward pass on its own threads. These threads do not inherit the context
    variables of the caller, but they inherit the objects that torch holds for the caller's thread
    (`thread_object`). The value is therefore kept in both places. The object is a pair (thread,
    value). A thread that finds the number of another thread in its object is running a backward
    pass for that other thread.
    """

    __slots__ = (
        "_closed",
        "_in_backward",
        "_key",
        "_last",
        "_open",
        "_variable",
        "blocks",
        "context_value",
        "default",
    )

    def __init__(self, name: str, default: T, *, in_backward: bool = True) -> None:
        self._key = name
        # whether the threads of a backward pass have the value of its caller
        self._in_backward = in_backward
        # the value outside of all blocks
        self.default: T = default
        self._variable = ContextVar(name, default=default)
        self._open: ContextVar[tuple[OpenBlock[T], ...]] = ContextVar(f"{name}_open", default=())
        # Reads the context variable, without a call in Python. On autograd's threads it returns
        # `default`.
        self.context_value: Callable[[], T] = self._variable.get
        # One entry for each open block of any thread. The entries of `set`, and of blocks that end
        # in another context, stay. While the list is empty, all contexts have `default`.
        self.blocks: list[None] = []
        # not empty once a block has ended in a context other than the one that opened it
        self._closed: list[None] = []
        self._last = _LastStashed()

    def get(self) -> T:
        """Return the current value."""
        value = self.context_value()
        if not self.blocks:
            return value
        if self._closed:
            value = self._without_closed(value)
        if not self._in_backward:
            return value
        if value is not self.default:
            if self._last.value is not value:
                self._stash(value)
            return value
        return self._of_caller()

    def set(self, value: T) -> None:
        """Set the value from here on, in this context and the backward passes that it starts.

        Inside a block it holds until the block ends.
        """
        self.blocks.append(None)
        opened = self._open.get()
        if opened:
            opened[-1].change = lambda _: value
        self._put(value)

    @contextmanager
    def entered(self, value: T) -> Iterator[None]:
        """Set `value` inside the block.

        The block must end in the context that opened it, and before the blocks around it. `change`
        does not have this limit.
        """
        token = self._variable.set(value)
        before = thread_object(self._key)
        self.blocks.append(None)
        self._stash(value)
        try:
            yield
        finally:
            set_thread_object(self._key, before)
            self._last.value = None
            self.blocks.pop()
            self._variable.reset(token)

    @contextmanager
    def change(self, change: Callable[[T], T]) -> Iterator[None]:
        """Set the value inside the block to `change(value outside)`.

        If an enclosing block ends first, the value outside changes, and `change` is applied again.
        """
        outside = self.get()
        inside = change(outside)
        opened = self._open.get()
        inherited = opened[-1].inherited if opened else self._foreign_object()
        block = OpenBlock(change, outside, _current_task(), inherited)
        self.blocks.append(None)
        self._open.set((*opened, block))
        self._put(inside)
        try:
            yield
        finally:
            self._close(block)

    def _close(self, block: OpenBlock[T]) -> None:
        """Undo the change of a block, and leave the changes of other blocks."""
        is_elsewhere = _current_task() != block.task or block not in self._open.get()
        if is_elsewhere:
            # a context in which the block is open drops the block when it next reads the value
            block.is_closed = True
            self._closed.append(None)
        else:
            self.blocks.pop()
        self._drop([block])

    def _drop(self, blocks: list[OpenBlock[T]]) -> None:
        """Remove blocks from the open ones of this context, and apply the other changes again."""
        opened = self._open.get()
        kept = [block for block in opened if block not in blocks]
        if len(kept) == len(opened):
            return
        first = next(i for i, block in enumerate(opened) if block in blocks)
        value = opened[first].outside
        # of open blocks a, b, c without b: c
        for block in kept[first:]:
            block.outside = value
            value = block.change(value)
        self._open.set(tuple(kept))
        if kept or opened[0].inherited is None:
            self._put(value)
            return
        # this thread of autograd reads the value of its caller again
        self._variable.set(value)
        set_thread_object(self._key, opened[0].inherited)
        self._last.value = None

    def _without_closed(self, value: T) -> T:
        """Return the value without the blocks that another context has closed."""
        closed = [block for block in self._open.get() if block.is_closed]
        if not closed:
            return value
        self._drop(closed)
        return self.context_value()

    def _put(self, value: T) -> None:
        self._variable.set(value)
        self._stash(value)

    def _stash(self, value: T) -> None:
        """Store a value for the threads of backward passes that this thread starts."""
        if not self._in_backward:
            return
        # the default needs no object
        held = None if value is self.default else (threading.get_ident(), value)
        set_thread_object(self._key, held)
        self._last.value = value

    def _foreign_object(self) -> Any:
        """Return the object of this thread if another thread has stored it, else None.

        The other thread has called the backward pass that this thread runs.
        """
        held = thread_object(self._key) if self._in_backward else None
        return None if held is None or held[0] == threading.get_ident() else held

    def _of_caller(self) -> T:
        """Return the value of a backward pass's caller on autograd's threads, else the default."""
        held = None if self._open.get() else self._foreign_object()
        if held is not None:
            value: T = held[1]
            return value
        if self._last.value is not self.default:
            # Another task of this thread is in a block and has stored its value. This task may
            # start a backward pass.
            self._stash(self.default)
        return self.default


def value_when_traced(scoped: ScopedValue[T]) -> T:
    """Return the value for code that is being compiled.

    It is a constant of the graph, guarded by the number of open blocks.
    """
    return scoped.get()


# torch.compile calls a function with this attribute while it traces, and takes the result as a
# constant. The decorator `assume_constant_result` sets the attribute too, but imports the compiler.
value_when_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch looks for it


def _current_task() -> tuple[int, object]:
    """Return the thread, and its asyncio task if it runs one."""
    asyncio: Any = sys.modules.get("asyncio")
    task = None
    if asyncio is not None:
        loop = asyncio._get_running_loop()
        task = None if loop is None else asyncio.current_task(loop)
    return threading.get_ident(), task
