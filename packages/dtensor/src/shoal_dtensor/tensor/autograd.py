"""Differentiable crossings: plain tensor <-> DTensor, and one spec to another.

A DTensor's gradient is the gradient with respect to its logical value. A redistribution does not
change the value, so it does not change the values of gradients either; a partial placement matters
only where local tensors enter or leave. The DTensor class is an argument here, because this module
is below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.autograd import Function

from shoal_mesh import check_replicas, purpose
from shoal_mesh.internal import is_observed, note

from .. import crossings
from .._torch.compiling import is_tracing
from .._torch.tensors import apply, is_transformed, make_wrapper, transform_error, wrap_local
from ..dispatch.global_call import replicated_spec
from ..dispatch.plain_tensors import check_recorded, verify_replicated
from ..errors import PlacementError
from ..layout.placements import Placement, Replicate
from ..layout.spec import Spec
from ..layout.tensor_meta import cache_last
from ..redistribute.execution.execute import in_memory_order, run_cached
from ..redistribute.plan import plan as find_plan
from ..redistribute.shards_in_flight import ENCLOSING_BATCH, CoalescedBatch
from ..redistribute.steps import Plan
from ..scopes import current, obey

# (forward, backward); None for the dtype of the tensor
Dtypes = tuple[torch.dtype | None, torch.dtype | None]


def move_to(cls: Any, tensor: Any, target: Spec, *, async_op: bool = False) -> Any:
    """Return the values of `tensor` in the layout of `target`; not differentiable.

    `target` is a spec with the shape and dtype of the tensor.
    """
    source = tensor._spec
    if source is target:
        return tensor
    plan = find_plan(source, target)
    return _run_plan(cls, tensor, plan, tensor._local_tensor, async_op=async_op)


def _run_plan(cls: Any, tensor: Any, plan: Plan, local: torch.Tensor, async_op: bool) -> Any:
    """Return a DTensor of an arriving local tensor; record the reason for debug modes."""
    if not plan.steps:
        return wrap_local(cls, local, plan.dst, False)
    if is_observed():
        with purpose(plan.purpose):
            return _receive(cls, tensor, plan, local, async_op=async_op)
    if plan.note is not None:
        # `with purpose(...)` takes half a microsecond more
        note(plan.note)
    return _receive(cls, tensor, plan, local, async_op=async_op)


def _receive(cls: Any, tensor: Any, plan: Plan, local: torch.Tensor, async_op: bool) -> Any:
    """Return a DTensor of a local tensor that arrives now, at its first use, or with a batch.

    The batch is the enclosing `coalesce()` block.
    """
    check_recorded("redistribute", local)
    # Without any block there is nothing to ask for.
    batch = ENCLOSING_BATCH.get() if ENCLOSING_BATCH.blocks else None
    if batch is not None:
        return queue_move(cls, batch, plan, local, source=tensor)
    if async_op:
        alone = CoalescedBatch()
        result = queue_move(cls, alone, plan, local, source=tensor)
        alone.start(copies=True)
        return result
    return wrap_local(cls, run_cached(plan, local, tensor, fresh=True), plan.dst, False)


def queue_move(
    cls: Any, batch: CoalescedBatch, plan: Plan, local: torch.Tensor, source: Any
) -> Any:
    """Return a DTensor of `source`, moved as planned, whose local tensor arrives with a batch."""
    result = deferred_result(cls, batch, plan.dst, local.device)
    batch.add(plan, local, source, result)
    return result


def deferred_result(cls: Any, batch: CoalescedBatch, spec: Spec, device: torch.device) -> Any:
    """Return a DTensor whose local tensor a batch delivers; its first use waits for it."""
    result = make_wrapper(
        cls.pending, spec.shape, spec.stride, None, None, spec.dtype, torch.strided, device
    )
    cls.local_slot.__set__(result, batch)
    result._spec = spec
    return result


def gradient_spec(spec: Spec) -> Spec:
    """Return the default layout of a tensor's gradient: replicated on axes with partial values."""
    return _reduced_spec(spec) if spec.partials else spec


@cache_last(4096)
def _reduced_spec(spec: Spec) -> Spec:
    return spec.without_partials()


def in_layout(layout: Spec, grad: Spec) -> Spec:
    """Return a gradient's spec in a layout, with the gradient's own shape, stride and dtype."""
    if grad.stride == layout.stride and grad.dtype == layout.dtype and grad.shape == layout.shape:
        return layout
    return layout.with_(shape=grad.shape, stride=grad.stride, dtype=grad.dtype)


def as_gradient(cls: Any, grad: Any, spec: Spec) -> Any:
    """`R -> R`: return the gradient of a DTensor as a DTensor.

    A plain gradient becomes a replicated DTensor once the ranks have compared it.

    Formulas of torch make plain zeros, and hooks and autograd functions of users may return any
    plain tensor.
    """
    if isinstance(grad, cls) or is_transformed(grad):
        return grad
    verify_replicated(spec.mesh, f"the gradient of {spec!r}", [grad], candidates=True)
    plain = grad.resolve_conj().resolve_neg()
    return wrap_local(cls, plain, replicated_spec(spec.mesh, plain), False)


class FromLocal(Function):
    """Conversion of a local tensor to a DTensor.

    The gradient arrives in the DTensor's placements, or in `grad_placements`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        cls: Any,
        spec: Spec,
        grad_placements: Sequence[Placement] | None,
    ) -> Any:
        ctx.spec = spec
        ctx.cls = cls
        if grad_placements is None:
            ctx.gradient = gradient_spec(spec)
        else:
            ctx.gradient = spec.with_(placements=grad_placements)
        # Operations on the local tensor of a DTensor do not need autograd history.
        return wrap_local(cls, local.detach(), spec, False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = as_gradient(ctx.cls, grads[0], ctx.spec)
        target = in_layout(ctx.gradient, grad._spec)
        obey("the gradient of from_local of", ctx.spec, find_plan(grad._spec, target))
        moved = moved_gradient(ctx.cls, grad, target)
        local = apply(ToLocal, moved, None) if torch.is_grad_enabled() else moved._local_tensor
        if not is_tracing():
            local = crossings.leave(ctx, local, ctx.spec)
        averaged = [axis for axis, op in ctx.spec.partials if op == "avg"]
        ranks = prod([ctx.spec.mesh.shape[axis] for axis in averaged])
        if ranks != 1:
            local = local / ranks
        return local, None, None, None


class ToLocal(Function):
    """Conversion of a DTensor to its local tensor.

    The local gradients, interpreted by `grad_placements`, become a DTensor again.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Any, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
        spec: Spec = tensor._spec
        ctx.cls = type(tensor)
        by_default = grad_placements is None
        if grad_placements is None:
            ctx.spec = gradient_spec(spec)
        else:
            ctx.spec = spec.with_(placements=grad_placements)
        ctx.checked = current().replicas_checked
        # `crossings` reads this attribute.
        ctx.by_default = by_default
        averaged = [axis for axis, op in spec.partials if op == "avg"]
        ctx.scaled = averaged if by_default else []
        local: torch.Tensor = tensor._local_tensor
        return local.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if is_transformed(grad):
            raise transform_error("the backward of to_local")
        if ctx.checked and ctx.spec.coordinate is not None:
            placements = enumerate(ctx.spec.placements)
            axes = tuple(axis for axis, p in placements if isinstance(p, Replicate))
            if axes:
                about = f"the gradient that to_local of {ctx.spec!r} got, global shape"
                check_replicas(grad, ctx.spec.mesh.comm(axes), about)
        for axis in ctx.scaled:
            grad = grad * ctx.spec.mesh.shape[axis]
        spec = ctx.spec if ctx.spec.dtype == grad.dtype else ctx.spec.with_(dtype=grad.dtype)
        if not is_tracing():
            grad, spec = crossings.enter(ctx, grad, spec)
        # Marks for "conjugate (or negate) later" are ignored on a tensor inside a subclass.
        plain = grad.resolve_conj().resolve_neg()
        # The stride of the spec determines whether views are possible, so the local tensor must
        # have the memory order of the spec.
        plain = _in_memory_order(spec)(plain)
        if torch.is_grad_enabled():
            return apply(FromLocal, plain, ctx.cls, spec, None), None
        return wrap_local(ctx.cls, plain, spec, False), None

    @staticmethod
    def gradient_shares(ctx: Any) -> Sequence[int] | None:
        spec: Spec = ctx.spec
        axes = [axis for axis, p in enumerate(spec.placements) if not isinstance(p, Replicate)]
        if not axes or spec.coordinate is None:
            return None
        return spec.mesh.ranks_along(axes, spec.coordinate)


_in_memory_order = cache_last(1024)(in_memory_order)


class Redistribute(Function):
    """Conversion of a DTensor to another spec, moved and differentiated in the given dtypes."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Any, cls: Any, target: Spec, dtypes: Dtypes, async_op: bool
    ) -> Any:
        forward_dtype, backward_dtype = dtypes
        source: Spec = tensor._spec
        ctx.source = source
        ctx.cls = cls
        ctx.dtypes = (backward_dtype, forward_dtype)
        local: torch.Tensor = tensor._local_tensor
        if forward_dtype is not None and forward_dtype != local.dtype:
            local = local.to(forward_dtype)
            source = source.with_(dtype=forward_dtype)
        spec = target if target.dtype == local.dtype else target.with_(dtype=local.dtype)
        if source.same_layout(spec):
            return wrap_local(cls, local.detach(), spec, False)
        return _run_plan(cls, tensor, find_plan(source, spec), local, async_op=async_op)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = as_gradient(ctx.cls, grads[0], ctx.source)
        source = in_layout(gradient_spec(ctx.source), grad._spec)
        moved = moved_gradient(ctx.cls, grad, source, ctx.dtypes)
        if moved.dtype != ctx.source.dtype:
            moved = moved.to(ctx.source.dtype)
        return moved, None, None, None, None


def moved_gradient(cls: Any, grad: Any, target: Spec, dtypes: Dtypes = (None, None)) -> Any:
    """Return a gradient in another layout.

    A node is added to the autograd graph if the backward is recorded, or if the gradient moves in
    another dtype.
    """
    if torch.is_grad_enabled() or dtypes[0] is not None:
        return apply(Redistribute, grad, cls, target, dtypes, False)
    return move_to(cls, grad, target)


def check_differentiable(spec: Spec) -> None:
    """Refuse gradients through partial values for which no local gradient can be computed."""
    for axis, op in spec.partials:
        if op not in ("sum", "avg"):
            raise PlacementError(
                f"gradients cannot flow through Partial({op!r}) on mesh axis "
                f"{spec.mesh.axis_names[axis]!r}, because it is not known which rank's value was "
                "taken; redistribute to Replicate or Shard first, or detach"
            )
