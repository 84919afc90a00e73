"""The passes of a unit: its parameters are gathered before its forward and before its backward, and freed after each.

Each forward is one node in the graph, `_GatheredUnit`, at which the gradients of all parameters
arrive when the last of them has been computed. Hooks of autograd's nodes gather again in backward.
Gradients are reduced beside it, and those of all units are delivered when the pass is over: a pass
that raises leaves every `.grad` as it was.

May import: _torch, reduction, unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from shoal_dtensor import DTensor
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import (
    FakeTensor,
    GradRoute,
    eager_only,
    first_order_only,
    grad_hooked,
    grad_route,
    in_backward,
    is_compiling,
    local_shard,
    pytree,
    running_pass,
    unwatched,
)

from ._torch import outer_saved_tensors_hooks, run_when_ready
from .reduction import GroupReduction, arrived, deliver
from .unit import Forward, Unit, Views, unit_of


def lead(unit: Unit, inner: Sequence[Unit]) -> None:
    """Have a unit become the outermost of these."""
    unit.frees = bool(unit.reshards)
    for each in inner:
        each.schedule, each.frees = unit.schedule, each.reshards is not False
        for handle in each.handles:
            handle.remove()
    unit.schedule.units += inner
    for module in {module for parameter in unit.parameters for module, _ in parameter.sites}:
        unit.handles += [
            module.register_forward_pre_hook(partial(_before_call, unit), prepend=True),
            module.register_forward_hook(partial(_after_call, unit), always_call=True),
        ]


def _before_call(unit: Unit, module: nn.Module, args: Any) -> None:
    """Hook: what stays gathered after the unit's forward is there for its modules, should they be called again."""
    if is_compiling() or unit.shown is not None or unit.frees:
        return
    forward = _enter_again(unit)
    unit.called = module
    forward.units = unit.schedule.units
    unit.guards.append(_guard(forward) if torch.is_grad_enabled() else nullcontext())
    unit.guards[-1].__enter__()


def _after_call(unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
    """Hook, also of a call that raised."""
    if is_compiling() or unit.called is not module:
        return
    unit.called = None
    unit.guards.pop().__exit__(None, None, None)
    unit.show()
    if unit.reshards is None and not torch.is_grad_enabled():
        unit.free()


def as_forward(module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a method of a unit's module returns; it counts as the unit's forward."""
    unit = unit_of(module)
    output = None
    try:
        args, kwargs = _before(unit, module, args, kwargs)
        output = method(*args, **kwargs)
    finally:
        output = _after(unit, module, output)
    return output


@eager_only
def _before(unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    continues = unit.running is not None and unit.shown is not None and module in unit.waiting
    unit.guards.append(nullcontext())
    if not continues:
        unit.running, unit.waiting = None, set(unit.modules)
        # what was gathered ahead the first time is gathered here when the forward runs again
        with unwatched():
            unit.running = _begin(unit)
    if torch.is_grad_enabled() and unit.running is not None:
        unit.guards[-1] = _guard(unit.running)
        unit.guards[-1].__enter__()
    precision = unit.policies[0]
    cast: tuple[Any, Any] = _cast(
        (args, kwargs), precision.param_dtype if precision.cast_forward_inputs else None
    )
    return cast


@eager_only
def _after(unit: Unit, module: nn.Module, output: Any) -> Any:
    """Free after the forward, also after one that raised; prepare the backward."""
    forward = unit.running
    schedule = unit.schedule
    views = forward.views() if forward is not None else None
    if unit.guards:
        unit.guards.pop().__exit__(None, None, None)
    output = _cast(output, unit.policies[0].output_dtype)
    for tensor in pytree.tree_leaves(output) if forward is not None else ():
        # gathered when its backward begins
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            node: Any = tensor.grad_fn
            node.register_prehook(
                lambda grads, forward=forward: running_backward().open(forward, views)
            )
    unit.waiting.discard(module)
    if not unit.waiting and not unit.guards:
        # units begin their backward in the opposite order, the outermost first
        if forward is not None:
            ended = schedule.ended
            recomputes = in_backward()
            at = len(ended) if not recomputes else ended.index(unit) if unit in ended else 0
            forward.before = ended[max(at - 1, 0) : at]
            if not recomputes:
                ended.append(unit)
        _leave(unit)
    if not in_backward() and schedule.units[0] is unit and not unit.guards:
        schedule.running = False
        for each in schedule.units:
            if each.running is not None:
                _leave(each)  # not all of its modules have run
    return output


def _leave(unit: Unit) -> None:
    """The forward of the unit's modules is over."""
    unit.running = None
    if unit.open:
        # recomputed in a backward that needs the parameters
        return
    if in_backward() and torch.is_grad_enabled():
        # a backward of what was recomputed follows
        running_backward().gathered.append(unit)
        return
    unit.show()
    if unit.frees or (unit.reshards is None and not torch.is_grad_enabled()):
        unit.free()


# --- the order of units ---------------------------------------------------------------------------


def _begin(unit: Unit) -> Forward:
    """A unit's forward begins: it is gathered, and the one that followed it the last time starts to be."""
    schedule = unit.schedule
    recomputes = in_backward()
    is_outermost = unit is unit.schedule.units[0]
    if not recomputes and (is_outermost or not schedule.running):
        schedule.previous, schedule.order, schedule.ended = schedule.order, [], []
        schedule.running = is_outermost
    at = len(schedule.order)
    previous = schedule.previous
    forward = enter(unit)
    forward.units = schedule.units
    if recomputes:
        return forward
    if forward.nodes and unit.kept:
        _show_arriving(forward)
    schedule.order.append(unit)
    follows = previous[at + 1 : at + 2] if previous[at : at + 1] == [unit] else ()
    for ahead in follows if unit.next_forward is None else unit.next_forward:
        ahead.start()
    return forward


# --- what modules see -----------------------------------------------------------------------------


def enter(unit: Unit) -> Forward:
    """Gather, and have the modules see the gathered parameters."""
    if unit.shown is None:
        for parameter in unit.parameters:
            parameter.adopt()
    gathered = unit.gather()
    views = Views(
        p.view(tensor) for p, tensor in zip(unit.parameters, gathered.tensors, strict=True)
    )
    unit.trained = unit.find_trained()
    forward = Forward(unit, gathered, unit.trained, ref(views), units=[unit])
    if torch.is_grad_enabled() and unit.trained:
        leaves = [unit.parameters[i].leaf for i in unit.trained]
        recorded = _GatheredUnit.apply(forward, [views[i] for i in unit.trained], *leaves)  # type: ignore[no-untyped-call]  # torch
        forward.nodes = [node for node, _ in recorded[0].grad_fn.next_functions[-len(recorded) :]]
        for i, view in zip(unit.trained, recorded, strict=True):
            views[i] = view
    unit.used = forward
    unit.show(views)
    return forward


def _enter_again(unit: Unit) -> Forward:
    """Have the modules see what the last forward gathered, as part of that forward if it is still there."""
    used = unit.used
    views = used.views() if used is not None and used.gathered.filled else None
    if used is None or views is None or used.gathered.versions != unit.versions:
        return enter(unit)
    recorded = used.trained == unit.find_trained() and all(
        views[i].requires_grad for i in used.trained
    )
    if torch.is_grad_enabled() and not recorded:
        return enter(unit)
    unit.show(views)
    return used


class _GatheredUnit(Function):
    """Sharded leaves -> what modules see of them; backward: hands the gradients to the pass."""

    @staticmethod
    def forward(
        ctx: Any, used: Forward, views: list[Tensor], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.used = used
        ctx.set_materialize_grads(False)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *running_backward().receive(ctx.used, grads))


def _show_arriving(forward: Forward) -> None:
    """Have the gradients of matrices added to kept ones as soon as they are there, not when all of the unit's are."""
    views = forward.unit.shown or Views()
    for i in (i for i in forward.trained if views[i].ndim > 1):  # those of vectors are small
        views[i] = views[i].view_as(views[i])
        node: Any = views[i].grad_fn
        run_when_ready(node)
        node.register_hook(
            lambda grads, _, i=i: (None,) if running_backward().arrive(forward, i, *grads) else None
        )
    forward.unit.show(views)


def _guard(forward: Forward) -> saved_tensors_hooks:
    """A block in which what autograd saves of gathered parameters is gathered again before it is read.

    Usually the unit's outputs have seen to that. What leaves a unit otherwise (an auxiliary loss
    kept in an attribute) or is differentiated in two passes (first to inputs, then to parameters)
    must not read memory that was given back. All else goes to the hooks outside, such as those of a
    checkpoint or an offload around the unit.
    """
    gathered = forward.gathered
    views = forward.views()
    outside = outer_saved_tensors_hooks()
    own = {
        t.untyped_storage().data_ptr() for t in gathered.tensors if not isinstance(t, FakeTensor)
    }

    def pack(tensor: Tensor) -> Any:
        local = local_shard(tensor) if isinstance(tensor, DTensor) else tensor
        if type(local) is Tensor and local.untyped_storage().data_ptr() in own:
            # a tensor that may have no memory when it is read
            return forward, tensor
        if outside is not None:
            return outside[0](tensor)
        # the node of an output would hold itself
        return tensor if tensor.grad_fn is None else tensor.detach()

    def unpack(saved: Any) -> Any:
        if not (isinstance(saved, tuple) and saved and saved[0] is forward):
            return saved if outside is None else outside[1](saved)
        if not gathered.filled:
            running_backward().open(forward, views)
        return saved[1]

    return saved_tensors_hooks(pack, unpack)


def _cast(tensors: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors, in whatever holds them, in a dtype; None leaves them."""
    if dtype is None:
        return tensors
    return pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tensors
    )


# --- a backward pass over units -------------------------------------------------------------------

# Where the gradients of a forward go; those that torch.autograd.grad returns; whether this rank
# keeps them.
Routes = tuple[dict[int, GradRoute], set[int], bool]


class UnitBackward:
    """What one backward pass has done to units, and has still to deliver."""

    def __init__(self) -> None:
        # those of its schedules, in one order on all ranks, and which leads them
        self._units: dict[Unit, Unit] = {}
        # which stay so until their gradients have arrived, or the pass ends
        self.gathered: list[Unit] = []
        # not those that a pass around this one has opened
        self._opened: set[Forward] = set()
        self._reductions: list[GroupReduction] = []
        self._routes: dict[Forward, Routes] = {}

    def open(self, forward: Forward, views: Views | None) -> None:
        """Prepare the backward of one forward: its parameters are there, those of the unit before are on their way."""
        unit = forward.unit
        if forward in unit.open:
            return
        self._reach(forward)
        if unit.current is not forward.gathered or forward.gathered.versions != unit.versions:
            raise StyleError(
                f"fully_shard: parameters of {unit.name!r} were written to between a forward and "
                "its backward, so the "
                "values that the forward used are gone; call the optimizer's step after the "
                "backward"
            )
        unit.gather()
        unit.show(views)
        unit.open.add(forward)
        self._opened.add(forward)
        self.gathered.append(unit)
        for before in forward.before if unit.next_backward is None else unit.next_backward:
            if before.used is not None and before.frees:
                before.start()
        if self._reductions:
            self._reductions[-1].poll()

    def _reach(self, forward: Forward) -> None:
        """Take the units of a schedule into the pass: the first that does has those of reentrant checkpoints inside."""
        first_order_only(
            "fully_shard: a backward with create_graph=True; second derivatives need parameters "
            "that are not freed: "
            "differentiate the module before it is sharded, or use replicate() and ask for "
            "gradients of inputs"
        )
        lead = forward.units[0]
        if lead.backward is None:
            for unit in forward.units:
                unit.check_kept()
            lead.backward = self
        self._units.update(dict.fromkeys(forward.units, lead))

    def _routes_of(self, forward: Forward) -> Routes:
        if forward not in self._routes:
            self._reach(forward)
            unit = forward.unit
            leaves = {i: forward.unit.parameters[i].leaf for i in forward.trained}
            routes = {
                i: grad_route(n, leaf)
                for (i, leaf), n in zip(leaves.items(), forward.nodes, strict=True)
            }
            captured = {
                i for i, leaf in leaves.items() if routes[i] == "return" and not grad_hooked(leaf)
            }
            self._routes[forward] = (
                routes,
                captured,
                not unit.syncs and (unit.stands_in or not captured),
            )
        return self._routes[forward]

    def arrive(self, forward: Forward, i: int, grad: Tensor | None) -> bool:
        """Add the gradient of a parameter to the kept one, if it stays or is reduced with that; whether it was."""
        unit = forward.unit
        (routes, _, stays) = self._routes_of(forward)
        adds = stays or (unit.kept and {*routes.values()} == {"accumulate"})
        if grad is None or routes[i] == "unused" or not adds:
            return False
        unit.add_to_kept(i, grad)
        return True

    def receive(self, forward: Forward, grads: Sequence[Tensor | None]) -> list[Any]:
        """Take the gradients of one forward of a unit; what autograd is to deliver at once."""
        unit = forward.unit
        (routes, captured, stays) = self._routes_of(forward)
        returned = {i for i, route in routes.items() if route == "return"}
        if forward in self._opened:
            unit.open.discard(forward)
            if not unit.open:
                unit.leave()
        each = zip(forward.trained, grads, strict=True)
        wanted = {i: g for i, g in each if routes[i] != "unused" and not self.arrive(forward, i, g)}
        if stays:
            return [unit.parameters[i].zeros() if i in captured else None for i in forward.trained]
        # At most one unit's gradients are on their way; behind them travels a shard of another's,
        # to the replicas.
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
        opened = {each.unit for each in self._opened}
        # it is a pass of torch.autograd.grad
        captures = any(captured for _, captured, _ in self._routes.values())
        for unit, lead in self._units.items():
            # A rank on which none of a unit's parameters was used takes part in the reduction all
            # the same.
            late = unit in opened or (unit.kept and not captures and lead.backward is self)
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
        for unit in self.gathered:
            unit.open.clear()
            unit.leave()
        self.gathered.clear()
        for lead in self._units.values():
            lead.backward = None if lead.backward is self else lead.backward


def running_backward() -> UnitBackward:
    """What the backward pass that is running does to units."""
    return running_pass().part(UnitBackward)
