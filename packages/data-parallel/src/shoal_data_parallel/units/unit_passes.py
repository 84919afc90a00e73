"""The passes of a unit: parameters are gathered before forward and backward, and freed after.

Each forward is one node in the graph, `GatheredUnit`, at which the gradients of all parameters
arrive when the last of them has been computed. Hooks of autograd's nodes gather again in backward.
Gradients are reduced while backward goes on, and the gradients of all units are delivered when the
pass is over: a pass that raises leaves every `.grad` as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from shoal_dtensor import DTensor
from shoal_dtensor.internal import (
    FakeTensor,
    eager_only,
    in_backward,
    in_transform,
    is_compiling,
    is_zero_without_memory,
    local_of,
    local_shard,
    open_blocks,
    pytree,
    types_are_checked,
    unwatched,
    unwatched_by_subclasses,
)
from shoal_mesh.internal import observers

from .._torch import outer_saved_tensors_hooks, outside_transforms, run_when_ready
from ..gradients.equal_rows import warn_of_equal_rows
from ..parameters.gathered_types import declare_whole
from ..parameters.sharded_parameters import install_switch, with_methods_of_dtensors
from .gathered import Gathered, Views
from .lent_values import LentCopy
from .unit import Forward, Unit, unit_of, units_of
from .unit_backward import running_backward


def make_outermost(unit: Unit, inner: Sequence[Unit]) -> None:
    """Make a unit and its peers the outermost of these units."""
    for peer in unit.peers:
        peer.schedule = unit.schedule
        peer.frees_after_forward = bool(peer.settings.reshard_after_forward)
    for other in inner:
        other.schedule = unit.schedule
        other.frees_after_forward = other.settings.reshard_after_forward is not False
        for handle in other.call_hooks:
            handle.remove()
    unit.schedule.units += [*unit.peers[1:], *inner]
    for peer in unit.peers:
        for module in {module for parameter in peer.parameters for module, _ in parameter.sites}:
            peer.call_hooks += [
                module.register_forward_pre_hook(partial(_before_call, peer), prepend=True),
                module.register_forward_hook(partial(_after_call, peer), always_call=True),
            ]


def _before_call(unit: Unit, module: nn.Module, args: Any) -> None:
    """Expose the values that stay gathered after an outermost unit's forward; a hook.

    The user may call one of the unit's modules by itself.
    """
    if is_compiling() or unit.exposed is not None or unit.frees_after_forward:
        return
    forward = enter_again(unit)
    forward.units = unit.schedule.units
    unit.scope.lone_call = module
    unit.scope.enter_guard(_guard_of(forward))


def _after_call(unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
    """Clean up after a call, also after one that raised; a hook."""
    if is_compiling() or unit.scope.lone_call is not module:
        return
    unit.scope.lone_call = None
    unit.scope.exit_guard()
    unit.hide()
    if _frees_in_evaluation(unit):
        unit.free()


def as_forward(module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a method of a unit's module as the unit's forward; return its output."""
    unit, *others = unit_of(module).peers
    for other in others:
        method = partial(_call_in_unit, other, module, method)
    return _call_in_unit(unit, module, method, *args, **kwargs)


def _call_in_unit(
    unit: Unit, module: nn.Module, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    output = None
    try:
        arguments = _gather_before_forward(unit, module, args, kwargs)
        output = method(*arguments[0], **arguments[1])
    finally:
        output = _free_after_forward(unit, module, output)
    return output


@eager_only
def _gather_before_forward(
    unit: Unit, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Gather before the forward of the first module.

    Returns the arguments in the dtype of the computation.
    """
    scope = unit.scope
    continues = scope.forward is not None and unit.exposed is not None and module in scope.awaited
    # `_after` always leaves one block, so one is entered before gathering, which may raise
    scope.enter_guard(nullcontext())
    if not continues:
        scope.begin(unit.modules)
        # empty lists outside of every block, in which alone replicas may be compared
        has_block = bool(open_blocks or observers)
        if has_block and unit.schedule.units[0] is unit:
            warn_of_equal_rows(module, args, kwargs, unit.axes.comm)
        # Tensors that are made inside of a transform of torch.func belong to it, and units keep the
        # tensors that are gathered ahead. Selective checkpointing must not save these collectives:
        # a recomputation sends parameters that were prefetched in the first forward.
        private = in_transform()
        with outside_transforms() if private else unwatched():
            scope.forward = _begin(unit, private=private)
    if scope.forward is not None:
        guard = _guard_of(scope.forward)
        scope.exit_guard()
        scope.enter_guard(guard)
    precision = unit.policies[0]
    cast: tuple[Any, Any] = _cast(
        (args, kwargs), precision.param_dtype if precision.cast_forward_inputs else None
    )
    return cast


@eager_only
def _free_after_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    """Free after the forward, also after one that raised; prepare the backward."""
    scope = unit.scope
    schedule = unit.schedule
    forward = scope.forward
    # read before the block is left, because only hooks of the block refer to the views
    views = forward.views() if forward is not None else None
    if scope.guards:
        scope.exit_guard()
    output = _cast(output, unit.policies[0].output_dtype)
    if forward is not None and not forward.private:
        _open_before_backward(output, forward, views)
    scope.awaited.discard(module)
    if scope.is_complete:
        if forward is not None:
            recomputing = in_backward()
            forward.before = schedule.ended_before(unit, recomputing=recomputing)
            if not recomputing:
                schedule.ended.append(unit)
        _leave(unit)
        # a forward that raised has no output, and `_leave` may raise
        unit.awaits_backward = output is not None and not in_backward()
    if not in_backward() and schedule.units[0] is unit and not scope.guards:
        schedule.running = False
        for other in schedule.units:
            # some modules of this unit have not run
            if other.scope.forward is not None:
                _leave(other)
    return output


def _open_before_backward(output: Any, forward: Forward, views: Views | None) -> None:
    """Have the unit gathered when the backward of one of its outputs begins."""

    def open_forward(grads: Any) -> None:
        running_backward().prepare(forward, views)

    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            node: Any = tensor.grad_fn
            node.register_prehook(open_forward)


def _leave(unit: Unit) -> None:
    """End the forward of the unit's modules."""
    forward = unit.scope.forward
    unit.scope.forward = None
    if unit.open:
        # the backward that recomputed this forward still needs the parameters
        return
    if in_backward() and torch.is_grad_enabled():
        # the backward of the recomputed values follows, and frees the unit when the pass ends
        running_backward().gathered.append(unit)
        return
    unit.check_frozen()
    if forward is not None:
        _check_memory(unit, forward.gathered)
    unit.hide()
    if unit.frees_after_forward or _frees_in_evaluation(unit):
        unit.end_forward()


def _check_memory(unit: Unit, gathered: Gathered) -> None:
    """Raise StyleError if a forward has given a parameter other memory, or another tensor.

    Example: `self.weight.data = values`, `self.weight = nn.Parameter(values)`.
    """
    seen = zip(unit.exposed or (), gathered.tensors, unit.parameters, strict=False)
    for view, tensor, parameter in seen:
        is_moved = False
        if parameter.extension is None:
            # `shares_memory` outside of tracing, without the time of its calls (0.7 us)
            local = view if parameter.inner is None else local_of(view)
            is_moved = local.untyped_storage()._cdata != tensor.untyped_storage()._cdata
        if is_moved or parameter.is_replaced(view):
            unit.hide()
            raise unit.written_error()


def _frees_in_evaluation(unit: Unit) -> bool:
    """Return whether an outermost unit is freed after a forward without gradients.

    By default it stays gathered only for its backward.
    """
    return unit.settings.reshard_after_forward is None and not torch.is_grad_enabled()


# --- the order of units ---------------------------------------------------------------------------


def _begin(unit: Unit, *, private: bool) -> Forward:
    """Gather a unit whose forward begins, outside of all transforms.

    The units that the user has chosen start to gather, too; by default it is the unit that followed
    the last time.
    """
    schedule = unit.schedule
    recomputing = in_backward()
    if not recomputing:
        unit.awaits_backward = False
        if unit.current.lent and unit.current.take_back():
            raise unit.written_error()
        schedule.begin_forward(unit)
        schedule.wait_for_optimizer()
        if unit is schedule.units[0]:
            for one in schedule.units:
                one.start_to_update_replicas()
    forward = _enter(unit, private=private)
    forward.units = schedule.units
    if recomputing:
        return forward
    keeps_gradients = bool(unit.kept) or not unit.syncs
    if forward.nodes and keeps_gradients:
        _show_arriving(forward)
    schedule.order.append(unit)
    following = unit.settings.prefetch_in_forward
    if following is None:
        following = schedule.next_last_time(unit)
    for other in following:
        for peer in other.peers:
            peer.gather_ahead()
    return forward


# --- tensors that modules see ---------------------------------------------------------------------


def enter(unit: Unit) -> Forward:
    """Gather, and expose the gathered parameters to the modules."""
    private = in_transform()
    with outside_transforms() if private else nullcontext():
        return _enter(unit, private=private)


def _enter(unit: Unit, *, private: bool) -> Forward:
    """Gather and expose, outside of all transforms.

    Args:
        unit: the unit.
        private: whether a transform runs. Its backward (of torch.func.grad) has no hooks that would
            gather again, so the forward gets copies of the gathered values, which stay.
    """
    if unit.exposed is None:
        with unwatched_by_subclasses():
            for parameter in unit.parameters:
                parameter.adopt()
    gathered = unit.gather()
    if private:
        gathered = replace(gathered, tensors=[tensor.clone() for tensor in gathered.tensors])
    views = Views(
        p.view(tensor) for p, tensor in zip(unit.parameters, gathered.tensors, strict=True)
    )
    unit.trained = unit.find_trained()
    forward = Forward(unit, gathered, unit.trained, ref(views), units=[unit], private=private)
    if torch.is_grad_enabled() and unit.trained:
        leaves = [unit.parameters[i].leaf for i in unit.trained]
        apply: Any = GatheredUnit.apply
        recorded = apply(forward, [views[i] for i in unit.trained], *leaves)
        forward.nodes = [node for node, _ in recorded[0].grad_fn.next_functions[-len(recorded) :]]
        for i, view in zip(unit.trained, recorded, strict=True):
            views[i] = view
            install_switch(view, unit.parameters[i])
    if types_are_checked():
        for parameter, view in zip(unit.parameters, views, strict=True):
            declared = None if parameter.declared is None else parameter.declared.type
            declare_whole(unit.axes.mesh, parameter.leaf, view, declared)
    if not private:
        unit.used = forward
    unit.expose(views)
    return forward


def enter_again(unit: Unit) -> Forward:
    """Have the modules see the tensors that the last forward gathered, and return that forward.

    If the tensors cannot be used again, begin a new forward.
    """
    used = unit.used
    views = used.views() if used is not None and used.gathered.has_values else None
    if used is None or views is None or used.gathered.versions != unit.versions:
        return enter(unit)
    if in_transform():
        return enter(unit)
    recorded = used.trained == unit.find_trained() and all(
        views[i].requires_grad for i in used.trained
    )
    if torch.is_grad_enabled() and not recorded:
        return enter(unit)
    unit.expose(views)
    return used


def value_outside(module: nn.Module, leaf: Any) -> Any:
    """Return what code outside of a forward gets for a parameter that a module holds.

    It is the parameter itself, or a copy of its gathered values between a forward that autograd has
    recorded and its backward. Code under `no_grad` gets the parameter itself, so that it can write
    to the shards.
    """
    if is_compiling() or not torch.is_grad_enabled() or in_backward() or in_transform():
        return leaf
    for unit in units_of(module, recurse=False):
        for index, parameter in enumerate(unit.parameters):
            if parameter.leaf is leaf:
                return _lend(unit, index) if _has_recorded_values(unit) else leaf
    return leaf


def _has_recorded_values(unit: Unit) -> bool:
    """Return whether a unit has stayed gathered since a forward that autograd has recorded."""
    used = unit.used
    if used is None or not unit.awaits_backward or not used.nodes or types_are_checked():
        return False
    return used.gathered.has_values and used.gathered.versions == unit.versions


def _lend(unit: Unit, index: int) -> Any:
    """Return a copy of the gathered values of a parameter, whose gradient the unit reduces."""
    forward = enter_again(unit)
    forward.units = unit.schedule.units
    assert unit.exposed is not None, "entering exposes"
    view = unit.exposed[index]
    unit.hide()
    lent = forward.gathered.lent
    if index not in lent:
        lent[index] = LentCopy.of(view)
    leaf: Any = unit.parameters[index].leaf
    values = with_methods_of_dtensors(lent[index].with_gradient_of(view), leaf)
    # Each read gives another tensor, so a hook goes to the leaf, whose gradient it will get.
    values.register_hook = leaf.register_hook
    values.register_post_accumulate_grad_hook = leaf.register_post_accumulate_grad_hook
    return values


class GatheredUnit(Function):
    """A function from sharded leaves to the tensors that modules see.

    Its backward hands the gradients to the running pass, which may return gradients for autograd.
    """

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
    """Add the gradients of matrices to kept ones as soon as they arrive.

    Otherwise they would wait for all gradients of the unit.
    """
    views = forward.unit.exposed or Views()
    # the gradients of vectors are small
    matrices = [i for i in forward.trained if views[i].ndim > 1]
    for i in matrices:
        views[i] = views[i].view_as(views[i])
        node: Any = views[i].grad_fn
        run_when_ready(node)
        node.register_hook(partial(_take_arriving, forward, i))
    forward.unit.expose(views)


def _take_arriving(
    forward: Forward, i: int, grads: tuple[Tensor | None], _: Any
) -> tuple[None] | None:
    """Take a gradient at a view's node; a hook.

    Returns a tuple, which replaces the gradient that goes on, or None, which leaves it.
    """
    was_added = running_backward().arrive(forward, i, *grads)
    return (None,) if was_added else None


def _guard_of(forward: Forward) -> AbstractContextManager[object]:
    """Return a block for the forward of modules that see gathered parameters."""
    needs_guard = torch.is_grad_enabled() and not forward.private
    return _guard(forward) if needs_guard else nullcontext()


def _guard(forward: Forward) -> saved_tensors_hooks:
    """Open a block in which saved views of gathered parameters are gathered again when read.

    Autograd saves the views. Usually a hook of the unit's outputs has gathered the unit before
    autograd reads them. Two cases have no such hook: a value that leaves the unit in another way
    (an auxiliary loss kept in an attribute), and a second pass over the same graph (first for
    inputs, then for parameters). Other saved tensors go to the hooks outside, such as the hooks of
    a checkpoint or an offload around the unit.
    """
    gathered = forward.gathered
    views = forward.views()
    outside = outer_saved_tensors_hooks()
    gathered_memory = {
        t.untyped_storage().data_ptr() for t in gathered.received if not isinstance(t, FakeTensor)
    }
    # the classes of extended parameters, which have gathered values in inner tensors
    classes = {type(t) for t in gathered.tensors} - {Tensor, FakeTensor}

    def pack(tensor: Tensor) -> Any:
        local = local_shard(tensor) if isinstance(tensor, DTensor) else tensor
        if type(local) is Tensor:
            # the zeros of a tangent have no memory
            has_memory = not is_zero_without_memory(local)
            is_gathered = has_memory and local.untyped_storage().data_ptr() in gathered_memory
        else:
            is_gathered = type(local) in classes
        if is_gathered:
            # a tensor that may have no memory when it is read
            return forward, tensor
        if outside is not None:
            return outside[0](tensor)
        # an output that is saved by its own node would make a cycle with the node
        return tensor if tensor.grad_fn is None else tensor.detach()

    def unpack(saved: Any) -> Any:
        if not (isinstance(saved, tuple) and saved and saved[0] is forward):
            return saved if outside is None else outside[1](saved)
        if not gathered.has_values:
            running_backward().prepare(forward, views)
            # `open` does not gather with `set_unshard_in_backward(False)`, or the second time
            forward.unit.gather()
        return saved[1]

    return saved_tensors_hooks(pack, unpack)


def _cast(tensors: Any, dtype: torch.dtype | None) -> Any:
    """Convert floating tensors, in any container, to a dtype; None leaves them."""
    if dtype is None:
        return tensors

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, convert, tensors)
