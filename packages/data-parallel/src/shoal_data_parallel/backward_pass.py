"""One backward pass over units: parameters are gathered again, gradients reduced beside it and delivered at its end.

Gradients of all units are delivered when the pass is over: a pass that raises leaves every `.grad` as it was.

May import: reduction, unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from shoal_dtensor import DTensor
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import (
    GradRoute,
    at_end_of_backward,
    backward_number,
    first_order_only,
    grad_hooked,
    grad_route,
)

from .reduction import Reduction, deliver
from .unit import Forward, Unit


class BackwardPass:
    """What one backward pass has done to units, and has still to deliver."""

    __slots__ = ("__weakref__", "_captures", "_expected", "_finished", "_open", "_opened", "_reductions", "_units")

    def __init__(self) -> None:
        self._units: dict[Unit, None] = {}  # all that belong together with those of the pass, in one order on all ranks
        self._open: list[Unit] = []
        self._opened: set[Forward] = set()  # not those that a pass around this one has opened
        self._expected: set[Unit] = set()  # those of the open units whose gradients have not arrived
        self._reductions: list[Reduction] = []
        self._captures = False  # whether the pass is one of torch.autograd.grad
        self._finished = False
        at_end_of_backward(self.finish)

    def open(self, forward: Forward) -> None:
        """Prepare the backward of one forward: its parameters are there, those of the unit before are on their way.

        Raises:
            StyleError: if a parameter was written to since, or kept gradients are those of half a backward.
        """
        unit = forward.unit
        if forward in unit.open:
            return
        if unit.spoiled:
            raise StyleError(
                f"fully_shard: a backward that was to keep gradients of {unit.name!r} raised, so some kept ones are "
                "of that backward. Drop them with the outermost module's zero_grad(), and begin the step again"
            )
        unit.refill(forward.gathered)
        unit.open.add(forward)
        self._opened.add(forward)
        self._open.append(unit)
        self._units.update(dict.fromkeys(forward.units))
        self._expected.add(unit)
        for before in forward.before[-1:] if unit.next_backward is None else unit.next_backward:
            if before.current is not None and before.frees:
                before.start()
        if self._reductions:
            self._reductions[-1].poll()

    def borrow(self, unit: Unit) -> None:
        """Have a unit that is gathered stay so until its gradients have arrived, or the pass ends."""
        self._open.append(unit)

    def receive(self, forward: Forward, grads: Sequence[Tensor | None], nodes: Sequence[Any]) -> list[Any]:
        """Take the gradients of one forward of a unit; what autograd is to deliver at once."""
        first_order_only()
        unit = forward.unit
        routes = {i: _route(n, unit.parameters[i].leaf) for i, n in zip(forward.trained, nodes, strict=True)}
        wanted = {i: g for i, g in zip(forward.trained, grads, strict=True) if routes[i] != "unused"}
        self._expected.discard(unit)
        self._units.update(dict.fromkeys(forward.units))
        if forward in self._opened:
            unit.open.discard(forward)
            if not unit.open:
                unit.leave()
        captured = [r == "return" and not grad_hooked(unit.parameters[i].leaf) for i, r in routes.items()]
        self._captures |= any(captured)
        if not unit.syncs and (unit.stands_in or not any(captured)):
            unit.spoiled = True  # until the pass is finished
            _keep(unit, wanted)
            return [unit.parameters[i].zeros() if c else None for i, c in zip(forward.trained, captured, strict=True)]
        if self._reductions:
            self._reductions[-1].wait()  # at most one reduction is on its way: two would hold two units' gradients
        kept = unit.kept
        if any(captured):
            unit.kept = {}  # torch.autograd.grad gets the gradients of this pass alone
        reduction = _reduction(unit, wanted, routes)
        if any(captured):
            unit.kept = kept
        self._reductions.append(reduction)
        if "return" not in routes.values():
            return [None] * len(grads)
        reduced = dict(zip(unit.trained, reduction.wait(), strict=True))
        return [self._given(unit.parameters[i].leaf, reduced.get(i), routes[i]) for i in forward.trained]

    def _given(self, leaf: Any, reduced: Tensor | None, route: GradRoute) -> Tensor | None:
        if route != "return" or reduced is None:
            return None
        given: Tensor = DTensor(reduced.to(leaf.device, leaf.dtype), leaf.spec)
        return given

    def finish(self) -> None:
        """Deliver the gradients and leave all units sharded."""
        reduced = {reduction.group for reduction in self._reductions}
        for unit in self._units:
            # A rank on which none of a unit's parameters was used takes part in the reduction all the same.
            late = unit in self._expected or (unit.kept and not self._captures)
            if unit.syncs and unit.trained and late and unit not in reduced:
                self._reductions.append(_reduction(unit, {}, {}))
        deliver(self._reductions)
        for unit in self._units:
            unit.spoiled = False
        self._finished = True
        self.close()

    def close(self) -> None:
        """Leave all units sharded."""
        self._reductions.clear()
        for unit in self._open:
            unit.open.clear()
            unit.leave()
        self._open.clear()

    def __del__(self) -> None:
        if not self._finished:  # a pass that raised
            for reduction in reversed(self._reductions):
                reduction.give_back()
            self.close()


def _reduction(unit: Unit, grads: dict[int, Tensor | None], routes: dict[int, GradRoute]) -> Reduction:
    """The reduction of a unit's gradients, by parameter, together with those that earlier passes have kept."""
    return Reduction(unit, [grads.get(i) for i in unit.trained], [routes.get(i, "accumulate") for i in unit.trained])


def reduce_kept(units: Iterable[Unit]) -> None:
    """Reduce and deliver the gradients that earlier passes have kept."""
    deliver([_reduction(unit, {}, {}) for unit in units if unit.kept])


def _route(node: Any, leaf: Any) -> GradRoute:
    return "unused" if node is None else grad_route(node, leaf)


def _keep(unit: Unit, grads: dict[int, Tensor | None]) -> None:
    """Add gradients to those that stay on this rank until a backward reduces them."""
    for i, grad in grads.items():
        if grad is not None:
            local, _ = unit.parameters[i].gradient(grad)
            # A copy: autograd may hand one tensor to several parameters, and it is added to in place.
            unit.kept[i] = unit.kept[i].add_(local) if i in unit.kept else local.clone()


_RUNNING: WeakValueDictionary[int, BackwardPass] = WeakValueDictionary()


def in_backward() -> bool:
    """Whether a backward pass is running on this thread."""
    return backward_number() != -1


def running_pass() -> BackwardPass:
    """The backward pass that is running."""
    number = backward_number()
    running = _RUNNING.get(number)
    if running is None:
        running = _RUNNING[number] = BackwardPass()
    return running
