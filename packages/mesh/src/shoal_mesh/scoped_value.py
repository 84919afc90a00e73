"""Values for the length of a block, separate for each task and thread.

A backward pass has the values of its caller.

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
        change: from the value outside of the block to the one inside.
        outside: the value outside.
        task: the thread and the task that opened it.
        inherited: the value that the thread held for its backward pass before the block, None
            outside of one.
        is_closed: whether it was closed in another context than it was opened in.
    """

    change: Callable[[T], T]
    outside: T
    task: tuple[int, object]
    inherited: Any
    is_closed: bool = False


class _LastStashed(threading.local):
    """The value that this thread holds for backward passes that it starts."""

    value: object = None


class ScopedValue(Generic[T]):
    """A value that nested blocks set, separate for each thread and task.

    A backward pass inherits the value. A block that ends undoes its own change, whichever blocks
    have ended before. A task that is started in a block keeps the value, as with any context
    variable.

    Autograd may run a backward pass on its own threads, which do not have the context variables of
    the caller, but have the objects that the caller's thread holds: a value is kept in both. The
    object of the thread also names the task that has stored it, since the tasks of a thread share
    the object.
    """

    __slots__ = (
        "_closed",
        "_in_backward",
        "_key",
        "_last",
        "_open",
        "_variable",
        "blocks",
        "default",
        "own",
    )

    def __init__(self, name: str, default: T, *, in_backward: bool = True) -> None:
        self._key = name
        # whether the threads of a backward pass have the value of its caller
        self._in_backward = in_backward
        # the value outside of all blocks
        self.default: T = default
        self._variable = ContextVar(name, default=default)
        self._open: ContextVar[tuple[OpenBlock[T], ...]] = ContextVar(f"{name}_open", default=())
        # the value of this context alone, without a call in Python; `default` also on autograd's
        # threads
        self.own: Callable[[], T] = self._variable.get
        # not empty while some thread is in a block
        self.blocks: list[None] = []
        # not empty once a block was closed in another context than it was opened in
        self._closed: list[None] = []
        self._last = _LastStashed()

    def get(self) -> T:
        """Return the current value."""
        value = self.own()
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

        It is for blocks inside of one call, which end before the blocks around them.
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
    def changed(self, change: Callable[[T], T]) -> Iterator[None]:
        """Apply a change to the outer value inside the block.

        It is applied again if an enclosing block ends first.
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
            # contexts that have it drop it as soon as they ask for the value
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
        for block in kept[first:]:
            block.outside = value
            value = block.change(value)
        self._open.set(tuple(kept))
        if kept or opened[0].inherited is None:
            self._put(value)
            return
        # a thread of autograd has the value of its caller again
        self._variable.set(value)
        set_thread_object(self._key, opened[0].inherited)
        self._last.value = None

    def _without_closed(self, value: T) -> T:
        """Return the value without the blocks that another context has closed."""
        closed = [block for block in self._open.get() if block.is_closed]
        if not closed:
            return value
        self._drop(closed)
        return self.own()

    def _put(self, value: T) -> None:
        self._variable.set(value)
        self._stash(value)

    def _stash(self, value: T) -> None:
        """Store a value for the threads of backward passes that this thread starts."""
        if not self._in_backward:
            return
        set_thread_object(self._key, (threading.get_ident(), value))
        self._last.value = value

    def _foreign_object(self) -> Any:
        """Return the object that this thread holds if another thread has stored it.

        That is the thread that called the backward pass.
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
            # another task of this thread is in a block, and a backward pass may begin in this one
            self._stash(self.default)
        return self.default


def value_when_traced(scoped: ScopedValue[T]) -> T:
    """Return the value for code that is being compiled.

    It is a constant of the graph, guarded by the number of open blocks.
    """
    return scoped.get()


# torch.compile calls it while it traces. `assume_constant_result` does the same, and imports the
# compiler.
value_when_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch looks for it


def _current_task() -> tuple[int, object]:
    """Return the thread, and its asyncio task if it runs one."""
    asyncio: Any = sys.modules.get("asyncio")
    task = None
    if asyncio is not None:
        loop = asyncio._get_running_loop()
        task = None if loop is None else asyncio.current_task(loop)
    return threading.get_ident(), task
