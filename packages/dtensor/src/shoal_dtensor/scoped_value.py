"""A value for the length of a block, in this context and in the backward passes that it starts.

May import: _torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

from ._torch.engine import set_thread_object, thread_object

T = TypeVar("T")


class ScopedValue(Generic[T]):
    """A value that blocks set; blocks nest, and threads and tasks do not see each other's.

    Autograd runs the backward of CUDA tensors, and deeply nested backwards, on threads of its own. Those have no
    context variables of the caller, but the objects that its thread holds, so a value is kept in both.

    Attributes:
        default: the value outside of all blocks.
        own: the value of this context alone, without a call in Python; `default` also on autograd's threads.
        blocks: not empty while some thread is in a block.
    """

    __slots__ = ("_key", "_variable", "blocks", "default", "own")

    def __init__(self, name: str, default: T) -> None:
        self._key = name
        self.default: T = default
        self._variable = ContextVar(name, default=default)
        self.own: Callable[[], T] = self._variable.get
        self.blocks: list[None] = []

    def get(self) -> T:
        """The value that holds here."""
        value = self.own()
        if value is not self.default or not self.blocks:
            return value
        held: T | None = thread_object(self._key)
        return value if held is None else held

    def set(self, value: T) -> None:
        """Let a value hold from here on, in this thread and the backward passes that it starts."""
        self.blocks.append(None)
        self._variable.set(value)
        set_thread_object(self._key, value)

    @contextmanager
    def entered(self, value: T) -> Iterator[None]:
        """Inside the block, `value` holds."""
        token, held = self._variable.set(value), thread_object(self._key)
        self.blocks.append(None)
        set_thread_object(self._key, value)
        try:
            yield
        finally:
            set_thread_object(self._key, held)
            self.blocks.pop()
            self._variable.reset(token)
