"""The product of a sharded Linear, and the collectives around it, in one autograd function.

The function works on the local shard of the weight. The shard's gradient is added to `.grad`, or
returned as a DTensor with the weight's spec. For backward the function saves an alias of the input,
and the shard of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor import DTensor
from shoal_dtensor.internal import (
    dispatch_modes,
    first_order_only,
    grad_route,
    local_shard,
    selectively_checkpointed,
    unwatched,
)
from shoal_mesh import Comm
from shoal_mesh.internal import Pending, all_reduce_

from ..lowering.collective_functions import (
    ActivationShard,
    gather_dim,
    reduce_scatter_dim,
)
from ..lowering.overlap import gathered_product, reduced_product
from ..lowering.parameters import deliver_grad, deliver_product, plain_error

# On a CPU the reduction of dx overlaps the product for the weight gradient if the product takes at
# least this many multiplications, about 50 us.
OVERLAP_FROM = 1 << 20

# A collective: a communicator for replicated or partial tensors, a shard for sharded ones; None for
# no collective.
Where = Comm | ActivationShard | None


class LinearOptions(NamedTuple):
    """Collectives before and after a product, and the form in which it runs.

    Attributes:
        before: the collective on the input: None, the input and its gradient stay as they are; a
            communicator, the input is replicated and its gradient is all-reduced; a sharded dim,
            the input is gathered and its gradient is reduce-scattered.
        after: the collective on the product: None, the product stays as it is; a communicator, the
            product is all-reduced; a sharded dim, the product is reduce-scattered and its gradient
            is gathered.
        dtype: the dtype of the product, if autocast chooses one.
        is_first_reader: whether other readers of the input may follow, so that the shared input is
            returned too (`shared_reduction`).
        chunks: number of chunks in which a collective overlaps the product.
    """

    before: Where = None
    after: Where = None
    dtype: torch.dtype | None = None
    is_first_reader: bool = False
    chunks: int = 1


class LinearProduct(Function):
    """Function x W^T + b of the local shards, with the collectives before and after it.

    The bias is added once, after the reduction. The first of several readers also returns the
    shared input, the replicated x that the later readers multiply.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: DTensor, bias: DTensor | None, options: LinearOptions
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.options = options
        ctx.input_dtype = x.dtype
        try:
            ctx.params = (weight, bias)
            bias_spec = None if bias is None else bias.spec
            ctx.specs = (weight.spec, bias_spec)
        except AttributeError:
            is_plain = not isinstance(weight, DTensor)
            plain: Any = weight if is_plain else bias
            raise plain_error("weight" if is_plain else "bias", plain) from None
        before, after, dtype, is_first_reader, chunks = options
        w = local_shard(weight)
        b = None if bias is None else local_shard(bias)
        if dtype is not None:
            w = w.to(dtype)
            # A bias that is added after a reduction keeps its dtype.
            if b is not None and after is None:
                b = b.to(dtype)
        out = None
        if isinstance(before, ActivationShard):
            shard = x if dtype is None else x.to(dtype)
            with unwatched():
                if chunks > 1:
                    shared, out = gathered_product(shard, w, b, before, chunks=chunks)
                else:
                    shared = gather_dim(shard, *before)
        else:
            shared = x.detach() if is_first_reader else x
        local = shared if dtype is None else shared.to(dtype)
        # The backward reads the input for the weight's gradient, and the weight for the input's.
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(local if needs_weight else None, w if needs_input else None)
        if after is not None:
            return _reduced_product(local, w, b, after, chunks=chunks)
        if out is None:
            out = linear(local, w, b)
        if not is_first_reader:
            return out
        ctx.set_materialize_grads(False)
        if not needs_input:
            ctx.mark_non_differentiable(shared)
        return out, shared

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, follower_grads: Tensor | None = None
    ) -> tuple[Any, ...]:
        first_order_only()
        x, w = ctx.saved_tensors
        options: LinearOptions = ctx.options
        needs_input = ctx.needs_input_grad[0]
        dx: Any = None
        if isinstance(options.after, ActivationShard) and grad is not None:
            grad = grad.contiguous()
            if needs_input and options.chunks > 1:
                grad, dx = gathered_product(grad, w.t(), None, options.after, chunks=options.chunks)
            else:
                grad = gather_dim(grad, *options.after)
        if needs_input:
            if grad is not None and dx is None:
                dx = grad.matmul(w)
            dx = _input_gradient(ctx, dx, follower_grads, w)
        dw = None
        db = None
        if grad is not None:
            dw, db = _weight_gradients(ctx, grad, x)
        if isinstance(dx, Pending):
            dx = dx.wait()
        if dx is not None and dx.dtype is not ctx.input_dtype:
            dx = dx.to(ctx.input_dtype)
        return dx, dw, db, None

    @staticmethod
    def gradient_shares(ctx: Any) -> Sequence[int] | None:
        """Return the ranks that contribute a share of the input's gradient; None for the whole."""
        before, after = ctx.options[:2]
        if isinstance(after, ActivationShard):
            return after.comm.ranks
        if after is not None:
            return None
        if before is None:
            # The gradient passes on unchanged: to the shared input, or to x.
            return ()
        comm: Comm = before.comm if isinstance(before, ActivationShard) else before
        return comm.ranks


def _reduced_product(
    x: Tensor, w: Tensor, bias: Tensor | None, after: Comm | ActivationShard, *, chunks: int
) -> Tensor:
    """Return the reduced product with the bias; an all-reduce is in place."""
    if chunks > 1:
        with unwatched():
            out = reduced_product(x, w, after, chunks)
            return out if bias is None else out.add_(bias)
    out = linear(x, w)
    if dispatch_modes() and selectively_checkpointed():
        # The checkpoint may have saved the product, so the reduction writes to a copy.
        with unwatched():
            return _reduce(out.clone(), bias, after)
    return _reduce(out, bias, after)


def _reduce(out: Tensor, bias: Tensor | None, after: Comm | ActivationShard) -> Tensor:
    if isinstance(after, ActivationShard):
        out = reduce_scatter_dim(out, *after)
    else:
        all_reduce_(out, after)
    if bias is not None:
        out += bias
    return out


def _input_gradient(
    ctx: Any, dx: Tensor | None, follower_grads: Tensor | None, w: Tensor
) -> Tensor | Pending | None:
    """Return the gradient of x, the sum of all readers' gradients, reduced as `before` specifies.

    The reduction may still be in flight.
    """
    before: Where = ctx.options.before
    is_gathered = isinstance(before, ActivationShard)
    # A gathered x has the dtype of the product, and so have the gradients of its readers.
    if dx is not None and not is_gathered and dx.dtype is not ctx.input_dtype:
        dx = dx.to(ctx.input_dtype)
    if follower_grads is not None:
        if dx is not None:
            dx += follower_grads
        elif before is None or is_gathered:
            dx = follower_grads
        else:
            # cloned, because the all-reduce is in place
            dx = follower_grads.clone()
    if dx is None or before is None:
        return dx
    # On a CPU, waking the thread that communicates takes longer than a small weight gradient.
    overlaps = dx.device.type != "cpu" or dx.numel() * w.shape[0] >= OVERLAP_FROM
    if isinstance(before, ActivationShard):
        scattered: Tensor | Pending = reduce_scatter_dim(dx, *before, async_op=overlaps)
        return scattered
    if overlaps:
        return all_reduce_(dx, before, async_op=True)
    return all_reduce_(dx, before)


def _weight_gradients(ctx: Any, grad: Tensor, x: Tensor) -> tuple[DTensor | None, DTensor | None]:
    """Return gradients of weight and bias from local dy (..., out) and x (..., in).

    A gradient that was added to `.grad` is None.
    """
    _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    if not needs_weight and not needs_bias:
        return None, None
    weight, bias = ctx.params
    weight_spec, bias_spec = ctx.specs
    edges = ctx.next_functions
    grad_rows = _as_rows(grad)
    weight_grad = None
    bias_grad = None
    if needs_weight:
        route = grad_route(edges[1][0], weight)
        if route != "unused":
            weight_grad = deliver_product(
                route, weight, weight_spec, grad_rows.t(), right=_as_rows(x)
            )
    if needs_bias:
        route = grad_route(edges[2][0], bias)
        if route != "unused":
            bias_grad = deliver_grad(route, bias, bias_spec, grad_rows.sum(0))
    return weight_grad, bias_grad


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a matrix of all rows of a tensor (..., features), which may have no features."""
    if tensor.ndim == 2:
        return tensor
    return tensor.reshape(prod(tensor.shape[:-1]), tensor.shape[-1])
