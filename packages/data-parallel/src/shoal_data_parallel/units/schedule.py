"""The progress of forwards: of one unit, and of all units below one outermost module.

A unit has the parameters of one `fully_shard` call, which are gathered and reduced together. The
outermost module is the `fully_shard` module that contains the others. A `ForwardScope` records
which modules of a unit are still to run in the unit's forward. A `Schedule` records the order of
units in a forward, so that the next forward can gather a unit early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import nn

if TYPE_CHECKING:
    from ..gradients.reduction import CommContext

# These stand for `unit.Unit` and `unit.Forward`, which this file cannot import: `unit` imports this
# file.
Unit = TypeVar("Unit")
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


@dataclass(slots=True, eq=False)
class Schedule(Generic[Unit]):
    """The units below one outermost module, and the order in which their forwards run."""

    # all of them, in one order on all ranks, the outermost first
    units: list[Unit]
    # reductions that no pass has delivered; modules may share it
    context: CommContext
    # the order in which units began in the running forward, or in the last one if none is running
    order: list[Unit] = field(default_factory=list)
    # the order in which units ended in that forward
    ended: list[Unit] = field(default_factory=list)
    # the order in which units began in the forward before
    previous: list[Unit] = field(default_factory=list)
    # whether the outermost module's forward is running
    running: bool = False
    # set by the user: whether the next backward is the last one of a step, and so delivers
    is_last_backward: bool = True
    # set by the user: whether only `finalize_backward` delivers gradients
    finalizes_manually: bool = False
    # set by the user: an event that the next forward's gathers wait for
    post_optimizer_event: Any = None

    def begin_forward(self, unit: Unit) -> None:
        """Begin a new order if a new forward begins with this unit.

        It begins with the outermost unit, or with another unit that runs outside of the outermost
        unit's forward. The hooks in `unit_passes` append to `order` and `ended`. When the outermost
        forward ends, they set `running` to False.
        """
        is_outermost = unit is self.units[0]
        if is_outermost or not self.running:
            self.previous = self.order
            self.order = []
            self.ended = []
            self.running = is_outermost

    def wait_for_optimizer(self) -> None:
        """Have the device wait for the user's event, once."""
        event = self.post_optimizer_event
        self.post_optimizer_event = None
        if event is not None:
            event.wait()

    def next_last_time(self, unit: Unit) -> Sequence[Unit]:
        """Return the unit that followed `unit` in the forward before; empty if unknown.

        `unit` is the last one of `order`. The forward before is a guide only if `unit` has the same
        position in both forwards.
        """
        position = len(self.order) - 1
        # The slices are empty where the forward before had fewer units.
        if self.previous[position : position + 1] != [unit]:
            return ()
        return self.previous[position + 1 : position + 2]

    def ended_before(self, unit: Unit, *, recomputing: bool) -> Sequence[Unit]:
        """Return the unit whose forward ended just before the forward of `unit`; empty if none.

        Its backward follows the backward of `unit`. `unit` is not in `ended` yet, unless a backward
        recomputes it: then its place is where it ended the first time.
        """
        position = len(self.ended)
        if recomputing:
            position = self.ended.index(unit) if unit in self.ended else 0
        # The slice has the unit before `position`; it is empty if `position` is 0.
        return self.ended[max(position - 1, 0) : position]
