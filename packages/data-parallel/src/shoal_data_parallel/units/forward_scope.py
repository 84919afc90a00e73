"""The progress of a unit's running forward."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import nn

# Stands for `unit.Forward`, which this file cannot import: `unit` imports this file.
Forward = TypeVar("Forward")


@dataclass(slots=True, eq=False)
class ForwardScope(Generic[Forward]):
    """Progress of a unit's forward, from the start of its first module to the end of its last."""

    forward: Forward | None = None
    # the modules whose forward is still to come
    awaited: set[nn.Module] = field(default_factory=set)
    # a block of hooks on saved tensors for each module that is running, the innermost last
    guards: list[AbstractContextManager[Any]] = field(default_factory=list)
    # a module of the unit that is called outside of the unit's forward
    lone_call: nn.Module | None = None

    @property
    def is_complete(self) -> bool:
        """True if no module is running or still to come."""
        return not self.awaited and not self.guards

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Start again, with all of these modules still to come."""
        self.forward = None
        self.awaited = set(modules)

    def enter_guard(self, guard: AbstractContextManager[Any]) -> None:
        """Have a module run inside a block, until `exit_guard`."""
        guard.__enter__()
        self.guards.append(guard)

    def exit_guard(self) -> None:
        """Leave the block of the innermost module."""
        self.guards.pop().__exit__(None, None, None)
