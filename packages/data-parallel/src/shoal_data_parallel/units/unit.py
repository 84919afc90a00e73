"""A unit: parameters gathered together for a module's forward and reduced together in backward.

A unit is in one of four states, and only the methods named here change it:

                 start_gathering()                finish_gathering()
      SHARDED ----------------------> GATHERING ----------------------> GATHERED
         ^                                                                  |
         +------------------------------- free() ---------------------------+
         |                                                                  |
         +---- free() ---- SHARDED_INSIDE <-------- shard_inside() ---------+
                                 |
                                 +--- start_gathering() ---> GATHERING

      SHARDED      a rank holds its shards; gathered tensors do not have values, and have memory
                   only with `keep_unsharded_storage`
      GATHERING    shards are in flight to the other ranks
      GATHERED     the gathered tensors have memory and values
      SHARDED_INSIDE    after a forward with `reshard_after_forward=<int>`: each group of this many
                   ranks holds all values, in larger shards; the next gather is inside of the group

The modules see the sharded leaves in every state, except in GATHERED between `expose()` and
`hide()`: then they see views of the gathered tensors. `gather()` is `start_gathering()`, unless
shards are in flight already, and `finish_gathering()`. `reshard()` is `hide()` and `free()`. If the
leaves of a GATHERED unit were written to, `start_gathering()` sends them again. The values arrive
in new tensors, because autograd's graph may still refer to the old ones.

A forward gathers and exposes its unit, and reshards the unit at its end; so does a backward.
Between the two, autograd's graph keeps the gathered tensors without their memory, and the backward
fills the same tensors again. `UnitSettings` may leave the unit in GATHERED after a pass. The next
pass then sends nothing, unless the leaves were written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor.errors import StyleError, TiedWeightError
from shoal_dtensor.internal import (
    redistribute_shards,
    register_owner,
    unwatched_by_subclasses,
)
from shoal_mesh import purpose

from .._torch import preserving_versions
from ..gradients.communication import CustomGather
from ..gradients.global_losses import watch
from ..gradients.gradient_group import Group
from ..gradients.reduction import CommContext
from ..parameters.agreement import check_values
from ..parameters.data_axes import DataAxes
from ..parameters.parameter_meshes import MeshAssignment
from ..parameters.policies import MixedPrecisionPolicy, OffloadPolicy
from ..parameters.sharded_parameters import (
    ShardedParameter,
    Site,
    parts_to_send,
    start_to_gather,
)
from ..parameters.sharding import make_whole, shard_parameter
from ..parameters.written_values import have_same_bits
from .gathered import Gathered, GatherInFlight, ValueComparison, Versions, Views
from .schedule import ForwardScope, Schedule
from .shared_shards import SharedShards
from .unit_settings import UnitSettings

STATE = "_shoal_fully_sharded"
"""The attribute of a unit's modules, and of the parameters that a unit shards."""


class UnitState(Enum):
    """Places of the values of a unit's parameters.

    The module's docstring draws the transitions.
    """

    SHARDED = auto()
    GATHERING = auto()
    GATHERED = auto()
    SHARDED_INSIDE = auto()


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of a unit."""

    unit: Unit
    # the values that the forward used
    gathered: Gathered
    # indices of the parameters whose gradients are recorded
    trained: list[int]
    views: ref[Views]
    # all units of the same outermost module
    units: Sequence[Unit]
    # whether the forward has copies of the gathered values, which `free()` does not free: it ran in
    # a transform of torch.func
    private: bool = False
    # the autograd nodes that the gradients of the trained parameters go to
    nodes: Sequence[Any] = ()
    # the unit whose forward ended just before, so that its backward begins next; empty if none
    before: Sequence[Unit] = ()


class Unit(Group):
    """The parameters of one `fully_shard` call on one mesh, gathered and reduced together."""

    made_by = "fully_shard"
    parameters: list[ShardedParameter]

    def __init__(
        self,
        modules: Sequence[nn.Module],
        axes: DataAxes,
        ignored: Sequence[nn.Parameter],
        assignment: MeshAssignment,
        policies: tuple[MixedPrecisionPolicy, OffloadPolicy],
        settings: UnitSettings[Unit],
    ) -> None:
        super().__init__("+".join(type(module).__name__ for module in modules), axes)
        # from the forward of the first module to the forward of the last, parameters are gathered
        self.modules: list[nn.Module] = list(modules)
        self.ignored = ignored
        # which parameters are this unit's, and their placements
        self.assignment = assignment
        # the units of one call, one for each mesh that parameters of the modules are on; the first
        # is the unit of the call's own mesh
        self.peers: list[Unit] = [self]
        self.policies = policies
        self.settings = settings
        self.parameters = []
        # whether the parameters were on the meta device when they were sharded
        self.was_on_meta = False
        # which gathers compare values from their beginning to their end
        self.comparison = ValueComparison()
        # indices of the parameters that required gradients in the last forward
        self.trained: list[int] = []
        # `reshard_after_forward` as a bool: its default differs between outermost and inner units
        self.frees_after_forward = True
        self.schedule: Schedule[Unit] = Schedule([self], CommContext())
        # the axes of the values that stay after a forward, if they differ
        kept_ranks = settings.reshard_after_forward
        self.axes_inside = axes.in_groups_of(kept_ranks) if type(kept_ranks) is int else None
        # the shards that replicas share, if replicas divide the leaves
        self.shared = SharedShards(self.name) if axes.shards_over_replicas else None
        # handles of hooks on the modules of an outermost unit: users may call a module by itself
        # after the unit's forward
        self.call_hooks: list[Any] = []

        # The state, which the methods below change: the gathered parameters, those in flight with
        # the versions of the leaves that were sent, and the tensors that modules see in place of
        # the leaves.
        self.current = Gathered([])
        self._in_flight: GatherInFlight | None = None
        self.exposed: Views | None = None

        # The passes, written by `unit_passes` and `unit_backward`: the progress of the running
        # forward; the last forward; the forwards whose backward is running; and, only in the first
        # unit of a schedule, the backward pass that reached the schedule first.
        self.scope: ForwardScope[Forward] = ForwardScope()
        self.used: Forward | None = None
        self.open: set[Forward] = set()
        self.backward: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: copied parameters, no gathered values, no kept gradients."""
        settings = replace(self.settings, prefetch_in_forward=None, prefetch_in_backward=None)
        copied = Unit(
            self.modules,
            self.axes,
            self.ignored,
            self.assignment,
            policies=self.policies,
            settings=settings,
        )
        copied.divisor = self.divisor
        copied.frees_after_forward = self.frees_after_forward
        copied.syncs = self.syncs
        copied.returns_zero_gradients = self.returns_zero_gradients
        copied.is_on_data_axes = self.is_on_data_axes
        copied.all_reduces = self.all_reduces
        copied.communication = self.communication
        copied.parameters = self.parameters
        copied.was_on_meta = self.was_on_meta
        copied.schedule = self.schedule
        copied.peers = self.peers
        copied.call_hooks = self.call_hooks
        copied.trained = copied.find_trained()
        return vars(copied)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        register_owner(self)
        watch(self.axes.mesh)

    # --- where the parameters are from ------------------------------------------------------------

    @property
    def keeps_gradients(self) -> bool:
        is_pending = any(reduction.group is self for reduction in self.schedule.context.pending)
        return self.holds_gradients or is_pending

    def drop_kept(self) -> None:
        super().drop_kept()
        self.schedule.context.drop(self)

    def held_parameters(self) -> Iterable[Tensor]:
        return [parameter.leaf for parameter in self.parameters]

    leaves = held_parameters

    def assign_all(self) -> None:
        """Find the placement and the axes of all parameters of the modules."""
        for param, sites in self._found_parameters():
            self.assignment.of(param, sites)

    def owned_parameters(self) -> list[tuple[nn.Parameter, list[Site]]]:
        """Return the parameters of this unit that the modules hold, with the modules that do."""
        return [
            (param, sites)
            for param, sites in self._found_parameters()
            if self.assignment.of(param, sites).axes is self.axes
        ]

    def _found_parameters(self) -> list[tuple[nn.Parameter, list[Site]]]:
        """Return the modules' parameters that no unit shards, each once, with all of its sites.

        Parameters of inner units are left out.

        Raises:
            TiedWeightError: if a unit of other modules shards one.
        """
        found: dict[int, tuple[nn.Parameter, list[Site]]] = {}
        units = {unit for module in self.modules for unit in units_of(module)}
        inner = units.difference(self.peers)
        others = {module for unit in inner for root in unit.modules for module in root.modules()}
        passed_over = {
            id(leaf) for peer in self.peers for leaf in peer.leaves() if peer is not self
        }
        passed_over.update(map(id, self.ignored))
        for name, owner in (pair for module in self.modules for pair in module.named_modules()):
            for key, param in owner._parameters.items() if owner not in others else ():
                if param is None or id(param) in passed_over:
                    continue
                if hasattr(param, STATE):
                    raise TiedWeightError(
                        f"fully_shard: the parameter {key!r} of {name!r} is shared with a module "
                        "that is part of another unit; make one unit of the modules that share it, "
                        "or of a module that contains them"
                    )
                found.setdefault(id(param), (param, []))[1].append((owner, key))
        return list(found.values())

    def take_parameters(self) -> None:
        """Shard the parameters that the modules hold now."""
        owned = self.owned_parameters()
        parameters = []
        for param, sites in owned:
            placement = self.assignment.of(param, sites).placement
            parameters.append(
                shard_parameter(param, sites, self.axes, placement, policies=self.policies)
            )
        self._reset(parameters)
        self.was_on_meta = any(parameter.leaf.is_meta for parameter in parameters)
        if self.axes_inside is not None:
            for parameter in self.parameters:
                parameter.keep_inside(self.axes, self.axes_inside)
        self.is_on_data_axes = any(p.is_on_data_axes for p in self.parameters)
        for param, _ in owned:
            setattr(param, STATE, True)
        register_owner(self)
        watch(self.axes.mesh)

    def restore_parameters(self) -> None:
        """Have the modules hold the parameters as they were before data axes sharded them."""
        self.reshard()
        make_whole(self.parameters)
        self._reset([])

    def _reset(self, parameters: list[ShardedParameter]) -> None:
        """Begin again with other parameters: nothing is gathered and the modules see the leaves."""
        self.current = Gathered([])
        self.used = None
        self._in_flight = None
        self.parameters = parameters
        if self.shared is not None:
            self.shared = SharedShards(self.name)
        self.trained = self.find_trained()
        self.hide()

    def find_trained(self) -> list[int]:
        """Return the parameters that require gradients now, or have kept ones."""
        held = {*self.kept, *self.scattered}
        with unwatched_by_subclasses():
            return [i for i, p in enumerate(self.parameters) if p.leaf.requires_grad or i in held]

    # --- the state and its transitions ------------------------------------------------------------

    @property
    def state(self) -> UnitState:
        """Return the place of the values of the parameters."""
        if self._in_flight is not None:
            return UnitState.GATHERING
        if self.current.has_values:
            return UnitState.GATHERED
        return UnitState.SHARDED_INSIDE if self.current.shards else UnitState.SHARDED

    @property
    def versions(self) -> Versions:
        """Return the versions of the leaves, and the default process group.

        Gathered values are out of date if any of them has changed.
        """
        world = dist.group.WORLD
        # Torch calls a Python function for each attribute of a DTensor, but not in this block.
        with unwatched_by_subclasses():
            return [(world and ref(world),), *[p.version() for p in self.parameters]]

    def gather_ahead(self) -> None:
        """Send the shards before modules need the values."""
        # the unit has not adopted a change of its leaves' dtypes yet
        with unwatched_by_subclasses():
            for parameter in self.parameters:
                parameter.set_dtypes()
        self.start_gathering()

    def start_to_update_replicas(self) -> None:
        """Send updated leaves to the other replicas, before the unit is gathered."""
        if self.shared is None:
            return
        for parameter in self.parameters:
            parameter.set_dtypes()
        if not self.current.versions:
            check_values(
                "fully_shard", self.modules, self.parameters, were_on_meta=self.was_on_meta
            )
        self.shared.start_to_update(self.parameters)

    def start_gathering(self, versions: Versions | None = None) -> None:
        """Send the shards, unless the values of the leaves are here or in flight.

        Args:
            versions: `self.versions`, if the caller knows them.
        """
        versions = self.versions if versions is None else versions
        is_here = self.current.has_values and self.current.versions == versions
        is_coming = self._in_flight is not None and self._in_flight.versions == versions
        if not self.parameters or is_here or is_coming:
            return
        if self.current.versions != versions:
            # these larger shards have earlier values of the leaves
            self.current.shards = []
        # `versions` is empty before the first gather
        if not self.current.versions:
            check_values(
                "fully_shard", self.modules, self.parameters, were_on_meta=self.was_on_meta
            )
        self._in_flight = self._send_shards(versions)

    def _send_shards(self, versions: Versions) -> GatherInFlight:
        all_gather = self.communication.all_gather
        axes_inside = self.axes_inside if self.current.shards else None
        with purpose(f"fully_shard gathers {self.name}"):
            axes = axes_inside or self.axes
            if axes_inside is not None:
                sent = self.current.shards
                moves = [parameter.move_after_forward() for parameter in self.parameters]
            elif self.shared is not None:
                sent = self.shared.current(self.parameters)
                moves = [parameter.move_of_shared_shard() for parameter in self.parameters]
            else:
                sent, moves = parts_to_send(self.parameters)
            layouts = [move.target for move in moves]
            if all_gather is None:
                return GatherInFlight(redistribute_shards(sent, moves), versions, layouts)
            return GatherInFlight(CustomGather(all_gather, axes, sent, moves), versions, layouts)

    def finish_gathering(self) -> None:
        """Wait for values in flight, if there are some, and write them to the gathered tensors."""
        in_flight = self._in_flight
        if in_flight is None:
            # The values are here already, or the unit does not have parameters.
            if not self.parameters and self.current.versions != self.versions:
                self.current = self._replace_gathered(self.versions)
            return
        self._in_flight = None
        if self.current.versions != in_flight.versions:
            self.current = self._replace_gathered(in_flight.versions)
        current = self.current
        # Later forwards, too, use values that were gathered under inference_mode. Autograd must not
        # count a refill as a write: the values are equal to the values that the forward used.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            preserving_versions(tuple(current.tensors)),
        ):
            in_flight.values.wait(lambda: current.allocate(in_flight.layouts))
            current.complete(self.parameters)
        current.shards = []
        current.note_values(reads_values=self.comparison.decide())

    def _replace_gathered(self, versions: Versions) -> Gathered:
        """Return the object for newer values of the leaves.

        It has new tensors, because a graph may refer to the old ones. With
        `keep_unsharded_storage` it has the same tensors.
        """
        replaced = self.current
        if not self.settings.keep_unsharded_storage:
            return Gathered(versions)
        replaced.has_values = False
        return Gathered(versions, replaced.tensors, replaced.received, replaced.inner)

    def gather(self, versions: Versions | None = None) -> Gathered:
        """Have the values of the leaves gathered, and return them; see `start_gathering`."""
        self.start_gathering(versions)
        self.finish_gathering()
        return self.current

    def free(self) -> None:
        """Free the memory of the gathered parameters.

        Raises:
            StyleError: if a gathered parameter was written to.
        """
        if not self.current.has_values:
            self.current.shards = []
            return
        were_changed = self.current.have_other_values or (
            self.current.were_written and not self._holds_values_of_leaves()
        )
        self.current.release(keeps_memory=self.settings.keep_unsharded_storage)
        if were_changed:
            raise self.written_error()

    def written_error(self) -> StyleError:
        """Return the error for gathered parameters that were written to."""
        return StyleError(
            f"fully_shard: gathered parameters of {self.name!r} were written to; the written "
            "values are lost, because shards do not change. Write to the parameters under no_grad, "
            "outside of the module's forward and of unshard()"
        )

    def shard_inside(self) -> None:
        """Keep this rank's shard over a small group of ranks, and free the gathered parameters."""
        if not self.current.has_values:
            return
        tensors = zip(self.parameters, self.current.tensors, strict=True)
        shards = [parameter.shard_after_forward(tensor) for parameter, tensor in tensors]
        self.free()
        self.current.shards = shards

    def end_forward(self) -> None:
        """Free the unit after a forward, or keep larger shards for its backward."""
        if self.axes_inside is not None and type(self.settings.reshard_after_forward) is int:
            self.shard_inside()
        else:
            self.free()

    def _holds_values_of_leaves(self) -> bool:
        """Return whether written gathered parameters still have the values of the shards.

        Registering a parametrization writes a tensor to itself. The shards are gathered again, on
        all ranks, because a forward writes the same on all ranks.
        """
        if self.current.versions != self.versions:
            return False
        text = f"fully_shard compares {self.name} with its shards"
        with torch.no_grad():
            again = start_to_gather(self.parameters, text).wait()
            return all(map(have_same_bits, self.current.received, again))

    def check_frozen(self) -> None:
        """Raise StyleError if the modules' view of a frozen parameter was made to require grad."""
        for view, parameter in zip(self.exposed or (), self.parameters, strict=False):
            if view.requires_grad and view.is_leaf:
                names = [name for _, name in parameter.sites]
                self.hide()
                raise StyleError(
                    f"fully_shard: the frozen parameter {names[0]!r} of {self.name!r} was made to "
                    "require gradients inside of the forward, which does not record its "
                    "gradient; call requires_grad_() before the forward"
                )

    def expose(self, views: Views) -> None:
        """Have the modules see views of the gathered tensors."""
        self.exposed = views
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.put(view)

    def hide(self) -> None:
        """Have the modules see the leaves."""
        self.exposed = None
        for parameter in self.parameters:
            parameter.put(parameter.leaf)

    def reshard(self) -> None:
        """Have the modules see the leaves, and free the gathered parameters."""
        self.hide()
        self.free()

    def end_backward(self) -> None:
        """Reshard after a backward, or only hide what a later pass is to use again."""
        self.hide()
        if self.settings.reshard_after_backward or self.current.were_written:
            self.free()

    def reset(self) -> None:
        """Return to SHARDED after an error; drop kept gradients and the state of passes."""
        if self.shared is not None:
            self.shared.finish()
        if self._in_flight is not None:
            self.finish_gathering()
        self.scope = ForwardScope()
        self.used = None
        self.open.clear()
        self.backward = None
        self.drop_kept()
        self.hide()
        self.current.release(keeps_memory=self.settings.keep_unsharded_storage)


def units_of(module: nn.Module, recurse: bool = True) -> list[Unit]:
    """Return the units in a module, each once, outer modules first."""
    owners = module.modules() if recurse else [module]
    leads = dict.fromkeys(vars(owner)[STATE] for owner in owners if STATE in vars(owner))
    return [unit for lead in leads for unit in lead.peers]


def unit_of(module: Any) -> Unit:
    """Return the first unit of a module: its unit on the mesh of the call."""
    unit: Unit = vars(module)[STATE]
    return unit
