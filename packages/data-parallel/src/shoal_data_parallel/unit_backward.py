"""One backward pass over units: parameters are gathered again, gradients reduced beside it and delivered at its end.

Gradients of all units are delivered when the pass is over: a pass that raises leaves every `.grad` as it was.

May import: reduction, unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shoal_dtensor import DTensor
from shoal_dtensor.internal import GradRoute, first_order_only, grad_hooked, grad_route, running_pass

from .reduction import GroupReduction, arrived, deliver
from .unit import Forward, Unit

_FIRST_ORDER = (
    "fully_shard: a backward with create_graph=True; second derivatives need parameters that are not freed: "
    "differentiate the module before it is sharded, or use replicate() and ask for gradients of inputs"
)


class UnitBackward:
    """What one backward pass has done to units, and has still to deliver."""

    __slots__ = ("_captures", "_expected", "_open", "_opened", "_reductions", "_routes", "_units")

    def __init__(self) -> None:
        self._units: dict[Unit, Unit] = {}  # those of its schedules, in one order on all ranks, and which leads them
        self._open: list[Unit] = []
        self._opened: set[Forward] = set()  # not those that a pass around this one has opened
        self._expected: set[Unit] = set()  # those of the open units whose gradients have not arrived
        self._reductions: list[GroupReduction] = []
        self._routes: dict[Forward, tuple[dict[int, GradRoute], set[int], bool]] = {}
        self._captures = False  # whether the pass is one of torch.autograd.grad

    def open(self, forward: Forward) -> None:
        """Prepare the backward of one forward: its parameters are there, those of the unit before are on their way.

        Raises:
            StyleError: if a parameter was written to since, or kept gradients are those of half a backward.
            SecondOrderError: under `create_graph=True`, whose graph would keep parameters that are freed.
        """
        unit = forward.unit
        if forward in unit.open:
            return
        first_order_only(_FIRST_ORDER)
        self._reach(forward)
        unit.refill(forward.gathered)
        unit.open.add(forward)
        self._opened.add(forward)
        self._open.append(unit)
        self._expected.add(unit)
        for before in forward.before[-1:] if unit.next_backward is None else unit.next_backward:
            if before.current is not None and before.frees:
                before.start()
        if self._reductions:
            self._reductions[-1].poll()

    def _reach(self, forward: Forward) -> None:
        """Take the units of a schedule into the pass: the first that does has those of reentrant checkpoints inside."""
        lead = forward.units[0]
        if lead.backward is None:
            for unit in forward.units:
                unit.check_kept()
            lead.backward = self
        self._units.update(dict.fromkeys(forward.units, lead))

    def borrow(self, unit: Unit) -> None:
        """Have a unit that is gathered stay so until its gradients have arrived, or the pass ends."""
        self._open.append(unit)

    def _routes_of(self, forward: Forward) -> tuple[dict[int, GradRoute], set[int], bool]:
        """Where the gradients of a forward go; those that torch.autograd.grad returns; whether this rank keeps them."""
        if forward not in self._routes:
            first_order_only(_FIRST_ORDER)
            self._reach(forward)
            unit, leaves = forward.unit, {i: forward.unit.parameters[i].leaf for i in forward.trained}
            routes = {i: grad_route(n, leaf) for (i, leaf), n in zip(leaves.items(), forward.nodes, strict=True)}
            captured = {i for i, leaf in leaves.items() if routes[i] == "return" and not grad_hooked(leaf)}
            self._routes[forward] = routes, captured, not unit.syncs and (unit.stands_in or not captured)
        return self._routes[forward]

    def arrive(self, forward: Forward, i: int, grad: Tensor | None) -> bool:
        """Add the gradient of a parameter to the kept one, if it stays or is reduced with that; whether it was."""
        unit, (routes, _, stays) = forward.unit, self._routes_of(forward)
        adds = stays or (unit.kept and {*routes.values()} == {"accumulate"})
        if grad is None or routes[i] == "unused" or not adds:
            return False
        unit.add_to_kept(i, grad)
        return True

    def receive(self, forward: Forward, grads: Sequence[Tensor | None]) -> list[Any]:
        """Take the gradients of one forward of a unit; what autograd is to deliver at once."""
        unit, (routes, captured, stays) = forward.unit, self._routes_of(forward)
        returned = {i for i, route in routes.items() if route == "return"}
        self._expected.discard(unit)
        if forward in self._opened:
            unit.open.discard(forward)
            if not unit.open:
                unit.leave()
        self._captures |= bool(captured)
        each = zip(forward.trained, grads, strict=True)
        wanted = {i: g for i, g in each if routes[i] != "unused" and not self.arrive(forward, i, g)}
        if stays:
            return [unit.parameters[i].zeros() if i in captured else None for i in forward.trained]
        # At most one unit's gradients are on their way; behind them travels a shard of another's, to the replicas.
        for reduction in self._reductions[-2:]:
            reduction.go_on()
        # torch.autograd.grad gets the gradients of this pass alone
        self._reductions.append(GroupReduction(unit, wanted, returned, with_kept=not captured))
        given: dict[int, Any] = dict.fromkeys(forward.trained)
        for i, grad in arrived(self._reductions[-1:])[0].items() if returned else ():
            if i in returned:
                leaf: Any = unit.parameters[i].leaf
                given[i] = DTensor(grad.to(leaf.device, leaf.dtype), leaf.spec)
        return [*given.values()]

    def finish(self) -> None:
        """Deliver the gradients and leave all units sharded."""
        reduced = {reduction.group for reduction in self._reductions}
        for unit, lead in self._units.items():
            # A rank on which none of a unit's parameters was used takes part in the reduction all the same.
            late = unit in self._expected or (unit.kept and not self._captures and lead.backward is self)
            if unit.syncs and unit.trained and late and unit not in reduced:
                self._reductions.append(GroupReduction(unit, {}))
        deliver(self._reductions)
        self._reductions.clear()
        for unit, lead in self._units.items():
            unit.spoiled = unit.spoiled and lead.backward is not self
        self._close()

    def fail(self) -> None:
        """Give kept gradients back, and leave all units sharded."""
        for reduction in reversed(self._reductions):
            reduction.give_back()
        self._close()

    def _close(self) -> None:
        for unit in self._open:
            unit.open.clear()
            unit.leave()
        self._open.clear()
        for lead in self._units.values():
            lead.backward = None if lead.backward is self else lead.backward


def running_backward() -> UnitBackward:
    """What the backward pass that is running does to units."""
    return running_pass().part(UnitBackward)
