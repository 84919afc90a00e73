"""One backward pass over units: it gathers them in turn, and reduces and delivers gradients.

A `UnitBackward` is the state of the pass. It prepares the backward of each forward, receives the
gradients of units, starts their reductions, and delivers the results at the end. If the pass fails,
it returns kept gradients to their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import (
    GradRoute,
    accumulation_hooks,
    first_order_only,
    grad_hooked,
    grad_route,
    running_pass,
    unwatched_by_subclasses,
)

from ..gradients.placeholders import placeholder_for
from ..gradients.reduction import GroupReduction, deliver, gradients_by_parameter
from .gathered import Views
from .schedule import Schedule
from .unit import Forward, Unit


class SilentHooks:
    """Post-accumulate hooks of leaves without a gradient, removed until the end of a pass.

    The backward of a unit is one autograd function with an edge to each leaf of the unit. Autograd
    then runs the node of each leaf. The node calls the leaf's post-accumulate hooks, even if the
    function has returned None for the leaf.
    """

    def __init__(self) -> None:
        # by `id` of the leaf: the leaf, and the hooks that were removed from it
        self._removed: dict[int, tuple[nn.Parameter, dict[int, Callable[..., Any]]]] = {}
        # `id` of the leaves that have got a gradient in the pass
        self._with_gradient: set[int] = set()

    def silence(self, leaf: nn.Parameter) -> None:
        """Remove the hooks of a leaf until the pass is over, unless it has got a gradient."""
        hooks = accumulation_hooks(leaf) or {}
        if hooks and id(leaf) not in self._with_gradient:
            self._removed[id(leaf)] = leaf, dict(hooks)
            # autograd holds this very dict
            hooks.clear()

    def enable(self, leaf: nn.Parameter) -> None:
        """Give a leaf its hooks back, because it gets a gradient: autograd is to call them."""
        self._with_gradient.add(id(leaf))
        _, hooks = self._removed.pop(id(leaf), (leaf, {}))
        if hooks:
            accumulation_hooks(leaf).update(hooks)

    def restore(self) -> None:
        """Give all leaves their hooks back."""
        for leaf, _ in list(self._removed.values()):
            self.enable(leaf)


@dataclass(frozen=True, slots=True)
class GradientRoutes:
    """The destinations of the gradients of one forward in a pass."""

    # by index of the parameter
    by_parameter: dict[int, GradRoute]
    # the parameters whose gradients autograd returns
    returned: set[int]
    # those of them whose gradients torch.autograd.grad returns
    captured: set[int]
    # whether autograd accumulates the gradients of all parameters
    all_accumulate: bool
    # whether this rank keeps the gradients for a later pass
    are_kept: bool


class UnitBackward:
    """The units that one backward pass has reached, and the gradients that it has yet to deliver.

    The object is a `PassPart`: the pass calls `finish` when all gradients are computed, and `fail`
    if an error ends the pass.
    """

    def __init__(self) -> None:
        # the units of its schedules, in one order on all ranks, and the first unit of each schedule
        self._units: dict[Unit, Unit] = {}
        # units that stay gathered until their gradients have arrived, or the pass ends
        self.gathered: list[Unit] = []
        # the forwards that this pass has opened, and not an enclosing pass
        self._opened: set[Forward] = set()
        self._reductions: list[GroupReduction] = []
        self._routes: dict[Forward, GradientRoutes] = {}
        self._hooks = SilentHooks()

    def prepare(self, forward: Forward, views: Views | None) -> None:
        """Prepare the backward of one forward.

        Its parameters are gathered, and the unit whose backward comes next starts to gather.
        """
        unit = forward.unit
        if forward in unit.open:
            return
        self._reach(forward)
        versions = unit.versions
        if unit.current is not forward.gathered or forward.gathered.versions != versions:
            raise StyleError(
                f"fully_shard: parameters of {unit.name!r} were written to between a forward and "
                "its backward, so the values that the forward used are gone; call the optimizer's "
                "step after the backward"
            )
        if unit.settings.unshard_in_backward:
            # The versions are equal, so values that are here are those of the leaves.
            if not unit.current.has_values:
                unit.gather(versions)
            if views is None:
                unit.hide()
            else:
                unit.expose(views)
        unit.open.add(forward)
        self._opened.add(forward)
        self.gathered.append(unit)
        chosen = unit.settings.prefetch_in_backward
        upcoming = forward.before if chosen is None else chosen
        for other in [peer for following in upcoming for peer in following.peers]:
            is_freed = other.used is not None and other.frees_after_forward
            # The forward has adopted the dtypes of the leaves. If they have changed since then, so
            # have the versions, and the backward of that unit raises.
            if is_freed and other.settings.unshard_in_backward:
                other.start_gathering()
        if self._reductions:
            self._reductions[-1].poll()

    def _reach(self, forward: Forward) -> None:
        """Add the units of the forward's schedule to this pass.

        Reentrant checkpoints run passes inside of others: the first pass that reaches a schedule
        delivers the gradients of its units.
        """
        first_order_only(
            "fully_shard: a backward with create_graph=True is not supported, because second "
            "derivatives need parameters that are not freed: differentiate the module before it "
            "is sharded, or use replicate() and ask for gradients of inputs"
        )
        forward.unit.awaits_backward = False
        outermost = forward.units[0]
        if outermost.backward is None:
            for unit in forward.units:
                unit.check_kept()
            outermost.backward = self
        self._units.update(dict.fromkeys(forward.units, outermost))

    def _routes_of(self, forward: Forward) -> GradientRoutes:
        if forward not in self._routes:
            self._reach(forward)
            self._routes[forward] = self._find_routes(forward)
        return self._routes[forward]

    def _find_routes(self, forward: Forward) -> GradientRoutes:
        unit = forward.unit
        routes: dict[int, GradRoute] = {}
        captured: set[int] = set()
        # Torch calls a Python function for each attribute of a DTensor, but not in this block.
        with unwatched_by_subclasses():
            for i, node in zip(forward.trained, forward.nodes, strict=True):
                leaf = unit.parameters[i].leaf
                routes[i] = grad_route(node, leaf)
                if routes[i] == "return" and not grad_hooked(leaf):
                    captured.add(i)
        may_keep = unit.returns_zero_gradients or not captured
        return GradientRoutes(
            routes,
            returned={i for i, route in routes.items() if route == "return"},
            captured=captured,
            all_accumulate={*routes.values()} == {"accumulate"},
            are_kept=not unit.syncs and may_keep,
        )

    def arrive(self, forward: Forward, i: int, grad: Tensor | None) -> bool:
        """Add a parameter's gradient to the kept one; return whether it was added.

        It is added if this pass keeps its gradients, or if it reduces a kept gradient together with
        its own.
        """
        unit = forward.unit
        routes = self._routes_of(forward)
        adds = routes.are_kept or (unit.kept and routes.all_accumulate)
        if grad is None or routes.by_parameter[i] == "unused" or not adds:
            return False
        unit.add_to_kept(i, grad)
        return True

    def receive(self, forward: Forward, grads: Sequence[Tensor | None]) -> list[Any]:
        """Receive the gradients of one forward of a unit.

        Returns the gradients that autograd is to deliver at once.
        """
        unit = forward.unit
        routes = self._routes_of(forward)
        captured = routes.captured
        returned = routes.returned
        if forward in self._opened:
            unit.open.discard(forward)
            if not unit.open:
                unit.end_backward()
        wanted: dict[int, Tensor | None] = {}
        for i, grad in zip(forward.trained, grads, strict=True):
            if routes.by_parameter[i] == "unused" or self.arrive(forward, i, grad):
                continue
            wanted[i] = grad
        if routes.are_kept:
            zeros = {i: placeholder_for(unit.parameters[i].leaf) for i in captured}
            return self._deliver_at_once(forward, zeros)
        if unit.communication.zeros_for_unused and not returned:
            # Ranks may reach units in different orders: all are reduced at the end, in one order.
            for i, grad in wanted.items():
                if grad is not None:
                    unit.add_to_kept(i, grad)
            return self._deliver_at_once(forward, {})
        # At most `max_in_flight` reductions, this one included, are in their first round. Each of
        # the two before them starts its last round, over the replicas, or ends if it has no further
        # round.
        begun = [*unit.schedule.context.pending, *self._reductions]
        others_in_first_round = unit.communication.max_in_flight - 1
        num_earlier = max(len(begun) - others_in_first_round, 0)
        earlier = begun[:num_earlier]
        for reduction in earlier[-2:]:
            reduction.go_on()
        # torch.autograd.grad gets the gradients of this pass alone
        self._reductions.append(
            GroupReduction.start(unit, wanted, returned, with_kept=not captured)
        )
        if not returned:
            return self._deliver_at_once(forward, {})
        (reduced,) = gradients_by_parameter(self._reductions[-1:])
        whole_grads: dict[int, Tensor] = {}
        for i in returned & reduced.keys():
            leaf: Any = unit.parameters[i].leaf
            grad = reduced[i].to(leaf.device, leaf.dtype)
            whole_grads[i] = DTensor(grad, leaf.spec)
        return self._deliver_at_once(forward, whole_grads)

    def _deliver_at_once(self, forward: Forward, grads: Mapping[int, Tensor]) -> list[Any]:
        """Return the gradients for autograd to deliver.

        Hooks of leaves that get no gradient are not called.
        """
        # A leaf with another route has no hooks, or autograd does not run its node.
        for i in self._routes_of(forward).returned | grads.keys():
            leaf = forward.unit.parameters[i].leaf
            if i in grads:
                self._hooks.enable(leaf)
            else:
                self._hooks.silence(leaf)
        return [grads.get(i) for i in forward.trained]

    def finish(self) -> None:
        """Deliver the gradients and leave all units sharded."""
        reduced = {reduction.group for reduction in self._reductions}
        opened = {forward.unit for forward in self._opened}
        # True in a pass of torch.autograd.grad
        captures = any(routes.captured for routes in self._routes.values())
        for unit, outermost in self._units.items():
            if unit in reduced or not (unit.syncs and unit.trained):
                continue
            # A rank on which none of a unit's parameters was used takes part in the reduction all
            # the same.
            delivers = outermost.backward is self and not captures
            wants_zeros = unit.communication.zeros_for_unused and unit.used is not None
            takes_part = delivers and (unit.holds_gradients or wants_zeros)
            if unit in opened or takes_part:
                self._reductions.append(GroupReduction.start(unit, {}))
        self._hooks.restore()
        self._deliver(captures=captures)
        for unit, outermost in self._units.items():
            unit.partially_accumulated = (
                unit.partially_accumulated and outermost.backward is not self
            )
        self._close()
        for unit in self._units:
            if unit.current.lent and unit.current.take_back():
                raise unit.written_error()

    def _deliver(self, *, captures: bool) -> None:
        """Deliver the gradients that this pass and earlier ones have reduced.

        Gradients that the user wants later stay in flight.
        """
        ready: list[GroupReduction] = []
        for schedule in dict.fromkeys(unit.schedule for unit in self._units):
            if not captures and not _defers_delivery(schedule):
                ready += schedule.context.take_pending()
        for reduction in self._reductions:
            schedule = cast(Unit, reduction.group).schedule
            # its sums over the shards go back to the group, for the group's next reduction
            stays_in_group = reduction.stops_at_replicas
            if _defers_delivery(schedule) and not reduction.returned and not stays_in_group:
                schedule.context.pending.append(reduction)
            else:
                ready.append(reduction)
        self._reductions.clear()
        deliver(ready)

    def fail(self) -> None:
        """Return kept gradients to their groups, and leave all units sharded."""
        for reduction in reversed(self._reductions):
            reduction.return_kept()
        self._close()

    def _close(self) -> None:
        self._hooks.restore()
        for unit in self.gathered:
            unit.open.clear()
            unit.end_backward()
        self.gathered.clear()
        for outermost in self._units.values():
            outermost.backward = None if outermost.backward is self else outermost.backward


def _defers_delivery(schedule: Schedule[Unit]) -> bool:
    """Return whether the end of a backward leaves reductions in flight."""
    return schedule.finalizes_manually or not schedule.is_last_backward


def running_backward() -> UnitBackward:
    """Return the state of units in the running backward pass."""
    return running_pass().part(UnitBackward)
