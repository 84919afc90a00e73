"""A unit: the parameters that are gathered together before a module's forward and reduced together in its backward.

What is freed in between is the storage of the gathered tensors: autograd's graph keeps the tensors,
and they are filled again before the unit's backward.

May import: _torch, global_losses, policies, reduction, sharded_parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor import Shard
from shoal_dtensor.errors import StyleError, TiedWeightError
from shoal_dtensor.internal import ShardsInFlight, register_owner

from ._torch import preserving_versions
from .global_losses import watch
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .reduction import Group
from .sharded_parameters import (
    DataAxes,
    ShardedParameter,
    Site,
    make_whole,
    shard_parameter,
    start_to_gather,
)

STATE = "_shoal_fully_sharded"
"""The attribute of a module that is a unit, or one of a unit's modules; and of a parameter that a unit shards."""

Versions = list[tuple[object, ...]]


@dataclass(slots=True, eq=False)
class Gathered:
    """The gathered parameters of a unit, from a forward to its backward."""

    # of the leaves when they were gathered (`Unit.versions`)
    versions: Versions
    # the gathered local tensors, one per parameter; without memory while they are freed
    tensors: list[Tensor] = field(default_factory=list)
    filled: bool = False  # whether the tensors have memory
    # how often each tensor had been written to when it was filled
    written: Sequence[int] = ()


class Views(list[Tensor]):
    """What modules see of gathered tensors. A unit holds it only so long: its graph holds the unit, unseen by gc."""


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of a unit."""

    unit: Unit  # the unit
    gathered: Gathered  # the values that it used
    # indices of the parameters whose gradients are recorded; `nodes` those that the gradients go to
    trained: list[int]
    views: ref[Views]
    units: Sequence[Unit]  # all units of the same outermost module
    nodes: Sequence[Any] = ()
    # the unit whose forward ended before, so that its backward begins next
    before: Sequence[Unit] = ()


@dataclass(slots=True, eq=False)
class Schedule:
    """The units below one outermost module, and the order in which their forwards run."""

    # all of them, in one order on all ranks, the outermost first
    units: list[Unit]
    # in which units began in the forward that runs, or was last
    order: list[Unit] = field(default_factory=list)
    ended: list[Unit] = field(default_factory=list)  # in which they ended
    previous: list[Unit] = field(default_factory=list)  # in which they began in the one before
    # whether the outermost module's forward is
    running: bool = False


class Unit(Group):
    """Parameters that are gathered together, and whose gradients travel together: those of the modules of one call."""

    owner = "fully_shard"
    parameters: list[ShardedParameter]

    def __init__(
        self,
        modules: Sequence[nn.Module],
        axes: DataAxes,
        ignored: Sequence[nn.Parameter],
        placement: Callable[[nn.Parameter], Shard | None] | None,
        policies: tuple[MixedPrecisionPolicy, OffloadPolicy],
        reshards: bool | None,
    ) -> None:
        super().__init__("+".join(type(module).__name__ for module in modules), axes)
        # gathered from the forward of the first to that of the last
        self.modules: list[nn.Module] = list(modules)
        self.ignored = ignored
        self.placement = placement
        self.policies = policies
        self.parameters = []
        # those that required gradients in the last forward
        self.trained: list[int] = []
        # What the user said of freeing after a forward, and what follows from it, as the outermost
        # unit or inside.
        self.reshards = reshards
        self.frees = True
        # whether torch.autograd.grad gets zeros while gradients are kept, for a pipeline stage
        self.stands_in = False
        # Those that start to gather when this one's forward, or backward, begins; None: what came
        # next the last time.
        self.next_forward: Sequence[Unit] | None = None
        self.next_backward: Sequence[Unit] | None = None
        self.schedule: Schedule = Schedule([self])  # of the outermost module
        # of the one that leads a schedule: the pass that reached it first, and runs
        self.backward: Any = None
        # the gathered parameters; of no version before the first forward
        self.current = Gathered([])
        self.used: Forward | None = None  # the last forward
        self.open: set[Forward] = set()  # the forwards whose backward is running
        # what the modules see of gathered parameters, rather than the leaves
        self.shown: Views | None = None
        self._coming: tuple[ShardsInFlight, Versions] | None = None
        self.running: Forward | None = None
        # the modules whose forward is still to come in the one that is running
        self.waiting: set[nn.Module] = set()
        self.guards: list[AbstractContextManager[Any]] = []
        # one of the unit's, outside of the unit's forward
        self.called: nn.Module | None = None
        self.handles: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy of the module: the same parameters' copies, with nothing gathered and nothing kept."""
        copied = Unit(
            self.modules,
            self.axes,
            self.ignored,
            self.placement,
            policies=self.policies,
            reshards=self.reshards,
        )
        copied.divisor = self.divisor
        copied.frees = self.frees
        copied.syncs = self.syncs
        copied.parameters = self.parameters
        copied.schedule = self.schedule
        copied.handles = self.handles
        copied.trained = copied.find_trained()
        return vars(copied)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        register_owner(self)
        watch(self.axes.mesh)

    # --- where the parameters are from ------------------------------------------------------------

    @property
    def keeps_gradients(self) -> bool:
        return bool(self.kept)

    def held(self) -> Iterable[Tensor]:
        return [parameter.leaf for parameter in self.parameters]

    leaves = held

    def own(self) -> list[tuple[nn.Parameter, list[Site]]]:
        """The parameters of the unit's modules and not of units in them, each once, with the modules that hold it."""
        owned: dict[int, tuple[nn.Parameter, list[Site]]] = {}
        inner = {unit for module in self.modules for unit in units_of(module)} - {self}
        others = {module for unit in inner for root in unit.modules for module in root.modules()}
        ignored = set(map(id, self.ignored))
        for name, owner in (pair for module in self.modules for pair in module.named_modules()):
            for key, param in owner._parameters.items() if owner not in others else ():
                if param is None or id(param) in ignored:
                    continue
                if hasattr(param, STATE):
                    raise TiedWeightError(
                        f"fully_shard: the parameter {key!r} of {name!r} is shared with a module "
                        "that is part of "
                        "another unit; make one unit of the modules that share it, or of a module "
                        "that contains them"
                    )
                owned.setdefault(id(param), (param, []))[1].append((owner, key))
        return list(owned.values())

    def take(self) -> None:
        """Shard the parameters that the modules hold now."""
        owned = self.own()
        self._reset(
            [
                shard_parameter(p, sites, self.axes, self.placement, self.policies)
                for p, sites in owned
            ]
        )
        for param, _ in owned:
            setattr(param, STATE, True)
        register_owner(self)
        watch(self.axes.mesh)

    def give_back(self) -> None:
        """Have the modules hold the parameters as they were before data axes sharded them."""
        self.leave()
        make_whole(self.parameters)
        self._reset([])

    def _reset(self, parameters: list[ShardedParameter]) -> None:
        """Begin again with other parameters: nothing is gathered, and the modules see the leaves."""
        self.current = Gathered([])
        self.used = None
        self._coming = None
        self.parameters = parameters
        self.trained = self.find_trained()
        self.show()

    def find_trained(self) -> list[int]:
        """The parameters that require gradients now, or have kept ones."""
        return [i for i, p in enumerate(self.parameters) if p.leaf.requires_grad or i in self.kept]

    # --- gathering --------------------------------------------------------------------------------

    @property
    def versions(self) -> Versions:
        """Of the leaves as they are now, and the default group: with another one, no rank counts on what it has."""
        world = dist.group.WORLD
        return [(world and ref(world),), *(p.version() for p in self.parameters)]

    def start(self) -> None:
        """Start to gather, unless the values are here or on their way."""
        versions = self.versions
        here = self.current.filled and self.current.versions == versions
        if (
            not self.parameters
            or here
            or (self._coming is not None and self._coming[1] == versions)
        ):
            return
        self._coming = (
            start_to_gather(self.parameters, f"fully_shard gathers {self.name}"),
            versions,
        )

    def gather(self) -> Gathered:
        self.start()
        coming = self._coming
        self._coming = None
        versions = self.versions if coming is None else coming[1]
        # with nothing on its way: there are no parameters
        if self.current.versions != versions:
            self.current = Gathered(versions)
        current = self.current
        if coming is None:
            return current

        def memory() -> list[Tensor]:
            specs = [p.gathered for p in self.parameters] if not current.tensors else []
            current.tensors += [
                torch.empty(s.local_shape, dtype=s.dtype, device=s.mesh.device_type) for s in specs
            ]
            for tensor in current.tensors:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            return current.tensors

        # What is gathered under inference_mode is used by later forwards too. Autograd does not
        # count it as a write: the values are those that the forward used.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            preserving_versions(tuple(current.tensors)),
        ):
            coming[0].wait(memory)
        current.filled, current.written = True, [tensor._version for tensor in current.tensors]
        return current

    def free(self) -> None:
        """Give the memory of the gathered parameters back; a StyleError if something was written to them."""
        current = self.current
        if not current.filled:
            return
        lost = current.written != [tensor._version for tensor in current.tensors]
        # the tensors stay, for autograd's graph holds them
        for tensor in current.tensors:
            tensor.untyped_storage().resize_(0)
        current.filled = False
        if lost:
            raise StyleError(
                f"fully_shard: gathered parameters of {self.name!r} were written to, which changes "
                "no shard: the "
                "values are lost. Write to the parameters outside of the module's forward and of "
                "unshard()"
            )

    # --- what modules see -------------------------------------------------------------------------

    def show(self, tensors: Views | None = None) -> None:
        """Have the modules see these tensors; the leaves when left out."""
        self.shown = tensors
        for i, parameter in enumerate(self.parameters):
            parameter.put(parameter.leaf if tensors is None else tensors[i])

    def leave(self) -> None:
        """Have the modules see the leaves, and give the memory back."""
        self.show()
        self.free()


def units_of(module: nn.Module, recurse: bool = True) -> list[Unit]:
    """The units in a module, each once, those of outer modules first."""
    owners = module.modules() if recurse else [module]
    return list(dict.fromkeys(vars(owner)[STATE] for owner in owners if STATE in vars(owner)))


def unit_of(module: Any) -> Unit:
    """The unit of a module that is one, or one of a unit's."""
    unit: Unit = vars(module)[STATE]
    return unit
