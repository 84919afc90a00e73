"""Linear layers sharded by output features (columns) or input features (rows), on local tensors.

    columns   x: R -> y: S(-1)       backward: all-reduce of dx (shared by all readers of x), beside dW
              x: S(d) -> y: S(-1)    all-gather of x; backward: reduce-scatter of dx, beside dW
    rows      x: S(-1) -> y: R       all-reduce of y; backward: nothing
              x: S(-1) -> y: S(d)    reduce-scatter of y; backward: all-gather of dy

Under a style with `.overlapped(chunks)` the gather of x, the reduction of y, and in the backward
the gather of dy run in chunks of dim 0 and overlap the products of other chunks. One autograd
function works on the local shard of the weight, whose gradient is added to `.grad` or returned as a
DTensor of the same spec. The input (an alias) and the shard of the weight are saved.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor import DTensor, Partial
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    apply,
    dispatch_modes,
    first_order_only,
    grad_route,
    is_compiling,
    local_shard,
    selectively_checkpointed,
    unwatched,
)
from shoal_mesh import Comm
from shoal_mesh.internal import Pending, all_reduce_

from .._torch import autocast_dtype, autocasting
from ..lowering import ports
from ..lowering.collective_functions import (
    ShardedDim,
    find_token,
    gather_dim,
    keep_token,
    reduce_scatter_dim,
    sharded_dim,
)
from ..lowering.lowered import Lowered, input_collectives, output_collectives, spec_of
from ..lowering.overlap import chunked_collectives, chunks_of, gathered_product, reduced_product
from ..lowering.parameters import check_plain, deliver_grad, deliver_product
from ..lowering.ports import from_local, local_input
from ..sharding.module_sharding import Collective, ModuleCall

Where = Comm | ShardedDim | None

OVERLAP_FROM = 1 << 20
"""Multiplications of a weight gradient on a CPU from which the reduction of dx runs beside it: some 50 us."""


class _LinearProduct(Function):
    """Function x W^T + b of the local shards, with the collectives before and after it.

        enters  None                 x as it is, its gradient too
                communicator         x: R       its gradient is all-reduced
                (comm, dim, sizes)   x: S(dim)  gathered; its gradient is reduce-scattered
        leaves  None                 y as it is
                communicator         y: P -> R
                (comm, dim, sizes)   y: P -> S(dim); its gradient is gathered

    The output gets its bias once, after the reduction. The leader of several readers also returns
    x: R, the token on which the other readers run (`collective_functions`).
    """

    @staticmethod
    def forward(  # noqa: PLR0913  # what autograd hands over
        ctx: Any,
        x: Tensor,
        weight: DTensor,
        bias: DTensor | None,
        enters: Where,
        leaves: Where,
        dtype: torch.dtype | None,
        leads: bool = False,
        chunks: int = 1,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.enters = enters
        ctx.leaves = leaves
        ctx.chunks = chunks
        ctx.input_dtype = x.dtype
        try:
            ctx.params = (weight, bias)
            ctx.specs = (weight.spec, None if bias is None else bias.spec)
        except AttributeError:
            check_plain(weight)
            raise
        w = local_shard(weight)
        b = None if bias is None else local_shard(bias)
        if dtype is not None:
            w, b = w.to(dtype), b if b is None or leaves is not None else b.to(dtype)
        out = None
        if isinstance(enters, tuple):
            token = x if dtype is None else x.to(dtype)
            with unwatched():
                if chunks > 1:
                    token, out = gathered_product(token, w, b, enters, chunks=chunks)
                else:
                    token = gather_dim(token, *enters)
        else:
            token = x.detach() if leads else x
        local = token if dtype is None else token.to(dtype)
        # A frozen weight needs no input in the backward, an input without gradient no weight.
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(local if needs_weight else None, w if needs_input else None)
        if leaves is not None:
            return _reduced(local, w, b, leaves, chunks)
        if out is None:
            out = linear(local, w, b)
        if not leads:
            return out
        ctx.set_materialize_grads(False)
        if not needs_input:
            ctx.mark_non_differentiable(token)
        return out, token

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, others: Tensor | None = None) -> tuple[Any, ...]:
        first_order_only()
        x, w = ctx.saved_tensors
        needs_input = ctx.needs_input_grad[0]
        dx: Any = None
        if isinstance(ctx.leaves, tuple) and grad is not None:
            grad = grad.contiguous()
            if needs_input and ctx.chunks > 1:
                grad, dx = gathered_product(grad, w.t(), None, ctx.leaves, chunks=ctx.chunks)
            else:
                grad = gather_dim(grad, *ctx.leaves)
        if needs_input:
            if grad is not None and dx is None:
                dx = grad.matmul(w)
            dx = _input_gradient(ctx, dx, others, w)
        dw, db = (None, None) if grad is None else _weight_gradients(ctx, grad, x)
        if isinstance(dx, Pending):
            dx = dx.wait()
        if dx is not None and dx.dtype is not ctx.input_dtype:
            dx = dx.to(ctx.input_dtype)
        return dx, dw, db, None, None, None, None, None

    @staticmethod
    def gradient_shares(ctx: Any) -> Sequence[int] | None:
        if ctx.leaves is not None:
            return ctx.leaves[0].ranks if isinstance(ctx.leaves, tuple) else None
        comm: Comm | None = ctx.enters[0] if isinstance(ctx.enters, tuple) else ctx.enters
        return () if comm is None else comm.ranks  # none: those of the token, or of x


def _reduced(
    x: Tensor, w: Tensor, bias: Tensor | None, leaves: Comm | ShardedDim, chunks: int
) -> Tensor:
    """Return the product, reduced (in place if it is all-reduced), with the bias."""
    if chunks > 1:
        with unwatched():
            out = reduced_product(x, w, leaves, chunks)
            return out if bias is None else out.add_(bias)
    out = linear(x, w)
    if dispatch_modes() and selectively_checkpointed():
        # it may have saved the product, which is written to otherwise
        with unwatched():
            return _reduce(out.clone(), bias, leaves)
    return _reduce(out, bias, leaves)


def _reduce(out: Tensor, bias: Tensor | None, leaves: Comm | ShardedDim) -> Tensor:
    if isinstance(leaves, tuple):
        out = reduce_scatter_dim(out, *leaves)
    else:
        all_reduce_(out, leaves)
    if bias is not None:
        out += bias
    return out


def _input_gradient(
    ctx: Any, dx: Tensor | None, others: Tensor | None, w: Tensor
) -> Tensor | Pending | None:
    """Return the gradient of x, `dx` plus `others`, reduced as `enters` specifies.

    The reduction may still be in flight.
    """
    where = ctx.enters
    # The token of a gathered x, and so the gradient of its readers, is in the dtype of the product.
    if dx is not None and not isinstance(where, tuple) and dx.dtype is not ctx.input_dtype:
        dx = dx.to(ctx.input_dtype)
    if dx is not None and others is not None:
        dx += others
    elif others is not None:
        dx = others.clone() if type(where) is Comm else others  # it is reduced in place
    if dx is None or where is None:
        return dx
    # On a CPU a small weight gradient is done before the thread that communicates has woken up:
    # waking it costs more.
    beside = dx.device.type != "cpu" or dx.numel() * w.shape[0] >= OVERLAP_FROM
    if isinstance(where, tuple):
        scattered: Tensor | Pending = reduce_scatter_dim(dx, *where, async_op=beside)
        return scattered
    return all_reduce_(dx, where, async_op=True) if beside else all_reduce_(dx, where)


def _weight_gradients(ctx: Any, grad: Tensor, x: Tensor) -> tuple[DTensor | None, DTensor | None]:
    """Return gradients of weight and bias from local dy (..., out) and x (..., in).

    A gradient that was added to `.grad` is None.
    """
    _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    weight_grad = None
    bias_grad = None
    if not needs_weight and not needs_bias:
        return None, None
    (weight, bias) = ctx.params
    (weight_spec, bias_spec) = ctx.specs
    edges = ctx.next_functions
    if grad.ndim != 2:
        # not by -1: the shard may have no features
        grad = grad.reshape(prod(grad.shape[:-1]), grad.shape[-1])
    if needs_weight and (route := grad_route(edges[1][0], weight)) != "unused":
        x = x if x.ndim == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])
        weight_grad = deliver_product(route, weight, weight_spec, grad.t(), right=x)
    if needs_bias and (route := grad_route(edges[2][0], bias)) != "unused":
        bias_grad = deliver_grad(route, bias, bias_spec, grad.sum(0))
    return weight_grad, bias_grad


class ColumnLinear(Lowered):
    """A column-wise Linear; plain replicated inputs take the shortest path."""

    __slots__ = ("chunks", "finished", "plain", "where")

    def resolve(self) -> None:
        replicated = self.port_in.layout.is_replicate()
        self.where: Where = self.comm if replicated else sharded_dim(self.port_in.layout, self.comm)
        self.chunks: int = chunks_of(self.sharding)
        # Whether the local product leaves the module as it is.
        self.finished: bool = (
            self.sharding.local_outputs and self.port_out.layout == self.port_out.desired
        )
        self.plain: bool = replicated and self.finished

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        entering = input_collectives(call)
        layout = call.sharding.input_port().layout
        yield from chunked_collectives(call, entering, call.input(), layout, ("all_gather", False))
        yield from output_collectives(call)

    def __call__(self, input: Tensor) -> Tensor:
        if is_compiling():
            local: Any = self.local("weight", "bias")
            return self.finish(
                linear(ports.replicated_input(self, input), local["weight"], local["bias"])
            )
        params = self.params
        direct = type(input) is Tensor and self.plain and not autocasting()
        # one is computed since
        if not direct or params.get("weight") is None or "bias" not in params:
            return self.finish(self.general(input))
        weight = params["weight"]
        bias = params["bias"]
        if torch.is_grad_enabled():
            return self.product(input, self.comm, weight, bias, None)
        if type(weight) is not DTensor:
            check_plain(weight)
        return linear(input, local_shard(weight), None if bias is None else local_shard(bias))

    def product(
        self, input: Tensor, where: Comm | ShardedDim, weight: Any, bias: Any, dtype: Any
    ) -> Tensor:
        """Return one reader's product of an activation that several may read.

        The readers gather the activation once, and reduce its gradient once.
        """
        out: Tensor
        grad = input.requires_grad and torch.is_grad_enabled()
        if isinstance(where, tuple):
            # the token is in the dtype of the product
            key: Hashable = (*where, dtype)
            alone = input.is_leaf and grad
        else:
            key = (where, None, None)
            alone = input.is_leaf or not grad
        token = None if alone else find_token(input, key, grad)
        chunks = self.chunks if input.ndim > 1 else 1
        if token is not None:
            out = apply(_LinearProduct, token, weight, bias, None, None, dtype)
        elif alone:
            out = apply(_LinearProduct, input, weight, bias, where, None, dtype, False, chunks)
        else:
            out, token = apply(
                _LinearProduct, input, weight, bias, where, None, dtype, True, chunks
            )
            keep_token(input, key, token)
        return out

    def general(self, input: Tensor) -> Tensor:
        """Return the local product for DTensor inputs, other layouts and autocast."""
        weight = self.parameter("weight")
        bias = self.parameter("bias")
        spec_of(weight, "weight")
        dtype = autocast_dtype(input)
        if not isinstance(input, DTensor):
            if self.where is not None:
                return self.product(input, self.where, weight, bias, dtype)
        elif self.chunks > 1 and input.device_mesh == self.mesh:
            (placement,) = input.placements
            where = sharded_dim(placement, self.comm)
            if where is not None:
                local = input.to_local(grad_placements=(placement,))
                sizes = input.spec.sizes(where[1])
                return self.product(local, (*where[:2], sizes), weight, bias, dtype)
        local = local_input(input, self.port_in, self.mesh, grad=Partial())
        out: Tensor = apply(_LinearProduct, local, weight, bias, None, None, dtype)
        return out

    def finish(self, out: Tensor) -> Tensor:
        return out if self.finished else ports.sharded_output(self, out)


class RowLinear(Lowered):
    """A row-wise Linear; plain sharded inputs and plain outputs take the shortest path."""

    __slots__ = ("chunks", "fast", "where")

    def resolve(self) -> None:
        self.chunks: int = chunks_of(self.sharding)
        reduced = self.port_out.desired.is_replicate()
        self.where: Where = self.comm if reduced else sharded_dim(self.port_out.desired, self.comm)
        direct = self.port_in.layout == self.port_in.desired and self.sharding.local_outputs
        self.fast: bool = reduced and direct and self.chunks == 1

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from input_collectives(call)
        x = call.input()
        placement = call.sharding.output_port().desired
        chunked = [("all_reduce", False), ("reduce_scatter", False)]
        if x is not None and x.requires_grad:
            chunked.append(("all_gather", True))
        yield from chunked_collectives(
            call, output_collectives(call, None), call.output, placement, *chunked
        )

    def __call__(self, input: Tensor) -> Tensor:
        if is_compiling():
            weight: Any = self.local("weight")["weight"]
            return ports.partial_output(
                self, linear(ports.sharded_input(self, input), weight), "bias"
            )
        params = self.params
        direct = type(input) is Tensor and self.fast and not autocasting()
        # one is computed since
        if not direct or params.get("weight") is None or "bias" not in params:
            return self.general(input)
        weight = params["weight"]
        bias = params["bias"]
        try:
            out: Tensor = apply(_LinearProduct, input, weight, bias, None, self.comm, None)
        except RuntimeError as error:
            spec = spec_of(weight, "weight")
            size = spec.local_shape[1]
            if input.ndim == 0 or input.shape[-1] != size:
                raise LayoutError(
                    f"{self.sharding.style}: a plain input is this rank's shard, with {size} of "
                    f"{spec.shape[1]} features in its last dim, got shape {tuple(input.shape)}. "
                    "Give input_layouts=Replicate() if every rank holds all of them, or shard the "
                    "module before it with ColwiseParallel()"
                ) from error
            raise
        return out

    def general(self, input: Tensor) -> Tensor:
        weight = self.parameter("weight")
        bias = self.parameter("bias")
        spec_of(weight, "weight")
        dtype = autocast_dtype(input)
        local = ports.sharded_input(self, input)
        where = self.target(local.shape)
        if where is None:
            return ports.partial_output(
                self, apply(_LinearProduct, local, weight, None, None, None, dtype), bias
            )
        chunks = self.chunks if local.ndim > 1 else 1
        out: Tensor = apply(_LinearProduct, local, weight, bias, None, where, dtype, False, chunks)
        return (
            out
            if self.sharding.local_outputs
            else from_local(out, self.port_out.desired, self.mesh)
        )

    def target(self, shape: torch.Size) -> Where:
        """Return the communicator, or sharded dim, over which the partial output is reduced.

        None if the output needs more than this reduction.
        """
        if not isinstance(self.where, tuple):
            return self.where
        comm, dim, sizes = self.where
        dim = dim + len(shape) if dim < 0 else dim
        if dim >= len(shape) - 1 or (sizes is None and shape[dim] % comm.size):
            return None
        return comm, dim, sizes
