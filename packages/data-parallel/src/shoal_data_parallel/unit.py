"""A unit: the parameters that are gathered together before a module's forward and reduced together in its backward.

What is freed in between is the storage of the gathered tensors: autograd's graph keeps the tensors, and they are filled
again before the unit's backward.  Each forward is one node in the graph, `_GatheredUnit`, at which the gradients of all
parameters arrive when the last of them has been computed.

May import: _torch, reduction, sharded_parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import ShardsInFlight, redistribute_shards
from shoal_mesh import purpose

from ._torch import preserving_versions
from .reduction import Group
from .sharded_parameters import DataAxes, ShardedParameter, shards_of

Versions = list[tuple[object, ...]]


@dataclass(slots=True, eq=False)
class Gathered:
    """The gathered parameters of a unit, from a forward to its backward."""

    versions: Versions  # of the leaves when they were gathered (`Unit.versions`)
    # the gathered local tensors, one per parameter; without memory while they are freed
    tensors: list[Tensor] = field(default_factory=list)
    # what modules see of the tensors, with its place in autograd's graph
    views: list[Tensor] = field(default_factory=list)
    filled: bool = False  # whether the tensors have memory
    _written: Sequence[int] = ()

    def free(self) -> None:
        """Give the memory back; the tensors stay, for autograd's graph holds them."""
        for tensor in self.tensors if self.filled else ():
            tensor.untyped_storage().resize_(0)
        self.filled = False

    def fill(self, parameters: Sequence[ShardedParameter], in_flight: ShardsInFlight) -> None:
        """Put the values back.  Autograd does not count it as a write: they are those that the forward used."""

        def memory() -> list[Tensor]:
            if not self.tensors:
                self.tensors = [p.empty() for p in parameters]
            for tensor in self.tensors:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            return self.tensors

        # What is gathered under inference_mode is used by later forwards too.
        with torch.inference_mode(False), torch.no_grad(), preserving_versions(tuple(self.tensors)):
            in_flight.wait(memory)
        self.filled, self._written = True, [tensor._version for tensor in self.tensors]

    @property
    def written(self) -> bool:
        """Whether something was written to the tensors: it would be lost."""
        return self.filled and self._written != [tensor._version for tensor in self.tensors]


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of a unit."""

    unit: Unit  # the unit
    gathered: Gathered  # the values that it used
    trained: list[int]  # indices of the parameters whose gradients are recorded; `nodes` those that the gradients go to
    units: Sequence[Unit]  # all units of the same outermost module
    nodes: Sequence[Any] = ()
    before: Sequence[Unit] = ()  # the unit whose forward ended before, so that its backward begins next


class Unit(Group):
    """Parameters that are gathered together, and whose gradients travel together.

    Attributes:
        name: of the module.
        parameters: the parameters; `trained` the indices of those that required gradients in the last forward.
        receive: takes the gradients in backward; set by the owner.
        frees: whether the gathered parameters are freed between forward and backward.
        stands_in: whether `torch.autograd.grad` gets zeros while gradients are kept, for a pipeline stage.
        backward: of the unit that leads its schedule, what the first pass that reached it, and runs, does to units.
        current: the gathered parameters; None before the first forward.
        used: the last forward.
        open: the forwards whose backward is running.
        shows_gathered: whether the modules see gathered parameters rather than the leaves.
        next_forward, next_backward: the units that start to gather when this one's forward, or backward, begins; None:
            the one that came next the last time.
    """

    owner = "fully_shard"
    parameters: list[ShardedParameter]
    receive: Callable[[Forward, Sequence[Tensor | None]], list[Any]]

    def __init__(self, name: str, parameters: list[ShardedParameter], axes: DataAxes) -> None:
        super().__init__(name, axes)
        self.parameters = parameters
        self.trained: list[int] = self._trained()
        self.frees = True
        self.stands_in = False
        self.backward: Any = None  # it stands above, and is kept here
        self.current: Gathered | None = None
        self.used: Forward | None = None
        self.open: set[Forward] = set()
        self.shows_gathered: bool = False
        self.next_forward: Sequence[Unit] | None = None
        self.next_backward: Sequence[Unit] | None = None
        self._coming: tuple[ShardsInFlight, Versions] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy of the module: the same parameters' copies, with nothing gathered and nothing kept."""
        copied = Unit(self.name, self.parameters, self.axes)
        copied.divisor, copied.frees, copied.syncs = self.divisor, self.frees, self.syncs
        copied.receive = self.receive
        return vars(copied)

    def reset(self) -> None:
        """Begin again with other parameters: nothing is gathered, and the modules see the leaves."""
        self.current, self.used, self._coming, self.trained = None, None, None, self._trained()
        self.show()

    def _trained(self) -> list[int]:
        return [i for i, p in enumerate(self.parameters) if p.leaf.requires_grad or i in self.kept]

    # --- gathering ----------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> Versions:
        """Of the leaves as they are now, and the default group: with another one, no rank counts on what it has."""
        world = dist.group.WORLD
        return [(world and ref(world),), *(p.version() for p in self.parameters)]

    def start(self) -> None:
        """Start to gather, unless the values are here or on their way."""
        versions = self.versions
        here = self.current is not None and self.current.filled and self.current.versions == versions
        if not self.parameters or here or (self._coming is not None and self._coming[1] == versions):
            return
        with purpose(f"fully_shard gathers {self.name}"):
            moves = [(p.resting, p.gathered) for p in self.parameters]
            self._coming = redistribute_shards(shards_of(self.parameters), moves), versions

    def gather(self) -> Gathered:
        """The gathered parameters, filled."""
        self.start()
        if self._coming is not None:
            (in_flight, versions), self._coming = self._coming, None
            if self.current is None or self.current.versions != versions:
                self.current = Gathered(versions)
            self.current.fill(self.parameters, in_flight)
        elif self.current is None or self.current.versions != self.versions:  # there are no parameters
            self.current = Gathered(self.versions)
        return self.current

    def free(self) -> None:
        """Give the memory of the gathered parameters back.

        Raises:
            StyleError: if something was written to them.
        """
        if self.current is None:
            return
        lost = self.current.written
        self.current.free()
        if lost:
            raise StyleError(
                f"fully_shard: gathered parameters of {self.name!r} were written to, which changes no shard: the "
                "values are lost. Write to the parameters outside of the module's forward and of unshard()"
            )

    # --- what modules see ---------------------------------------------------------------------------------------------

    def enter(self) -> Forward:
        """Gather, and have the modules see the gathered parameters."""
        if not self.shows_gathered:
            for parameter in self.parameters:
                parameter.adopt()
        gathered = self.gather()
        views = [p.view(tensor) for p, tensor in zip(self.parameters, gathered.tensors, strict=True)]
        self.trained = self._trained()
        forward = Forward(self, gathered, self.trained, units=[self])
        if torch.is_grad_enabled() and self.trained:
            recorded = _GatheredUnit.apply(
                forward, [views[i] for i in self.trained], *[self.parameters[i].leaf for i in self.trained]
            )  # type: ignore[no-untyped-call]  # torch
            forward.nodes = [node for node, _ in recorded[0].grad_fn.next_functions[-len(recorded) :]]
            for i, view in zip(self.trained, recorded, strict=True):
                views[i] = view
        if self.used is not None and self.used.gathered is not gathered:
            self.used.gathered.views.clear()  # their graph holds the forward, and so them: nobody would collect it
        gathered.views, self.used = views, forward
        self.show(views)
        return forward

    def enter_again(self) -> Forward:
        """Have the modules see what the last forward gathered, as part of that forward if it is still there."""
        used = self.used
        if used is None or not used.gathered.filled or used.gathered.versions != self.versions:
            return self.enter()
        views = used.gathered.views
        recorded = used.trained == self._trained() and all(views[i].requires_grad for i in used.trained)
        if torch.is_grad_enabled() and not recorded:
            return self.enter()
        self.show(views)
        return used

    def show(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Have the modules see these tensors; the leaves when left out."""
        self.shows_gathered = tensors is not None
        for i, parameter in enumerate(self.parameters):
            parameter.put(parameter.leaf if tensors is None else tensors[i])

    def leave(self) -> None:
        """Have the modules see the leaves, and give the memory back."""
        self.show()
        self.free()

    def refill(self, gathered: Gathered) -> None:
        """Gather the values that a forward used again, for its backward.

        Raises:
            StyleError: if a parameter was written to since.
        """
        if self.current is not gathered or gathered.versions != self.versions:
            raise StyleError(
                f"fully_shard: parameters of {self.name!r} were written to between a forward and its backward, so the "
                "values that the forward used are gone; call the optimizer's step after the backward"
            )
        self.show(self.gather().views)


class _GatheredUnit(Function):
    """Sharded leaves -> what modules see of them; backward: hands the gradients to the unit's receiver."""

    @staticmethod
    def forward(ctx: Any, used: Forward, views: list[Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.used = used
        ctx.set_materialize_grads(False)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *ctx.used.unit.receive(ctx.used, grads))
