"""Linear layers sharded by input features (rows), on local tensors with explicit collectives.

x: S(-1) -> y: R        all-reduce of y; backward: nothing
x: S(-1) -> y: S(d)     reduce-scatter of y; backward: all-gather of dy

Under a style with `.overlapped(chunks)` it does so in chunks of dim 0: the reduction of one beside the product of the
next, in the backward the all-gather of the next beside the products of dx.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor import DTensor, Spec
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    apply,
    dispatch_modes,
    first_order_only,
    is_compiling,
    local_shard,
    selectively_checkpointed,
    unwatched,
)
from shoal_mesh import Comm
from shoal_mesh.internal import all_reduce_

from .._torch import autocast_dtype, autocasting
from ..lowering.boundary import from_local
from ..lowering.collective_functions import ShardedDim, gather_dim, reduce_scatter_dim, sharded_dim, uneven_output
from ..lowering.lowered import Lowered, spec_of
from ..lowering.overlap import chunks_of, gathered_product, in_chunks, reduced_product
from ..lowering.parameters import note_parameters, save_operands, weight_grads
from ..lowering.ports import declare_partial_output, declare_sharded_input, partial_output, sharded_input
from ..sharding.module_sharding import Collective, ModuleCall

Grads = tuple[Any, ...]


def _reduced(out: Tensor, bias: DTensor | None, where: Comm | ShardedDim | None) -> Tensor:
    """The product, reduced (in place where it is all-reduced), and the bias."""
    if type(where) is Comm:
        all_reduce_(out, where)
    elif isinstance(where, tuple):
        out = reduce_scatter_dim(out, *where)
    if bias is not None:
        out += local_shard(bias)
    return out


class _RowProduct(Function):
    """x: S(-1), W: S(1), b: R -> y: R (`where` is a communicator), S(d) (communicator, dim, sizes), or P (None).

    The bias is added once, after the reduction.  Several chunks run beside their collectives.
    """

    @staticmethod
    def forward(  # noqa: PLR0913  # what autograd hands over
        ctx: Any,
        x: Tensor,
        weight: DTensor,
        bias: DTensor | None,
        where: Comm | ShardedDim | None,
        dtype: torch.dtype | None,
        chunks: int = 1,
    ) -> Tensor:
        ctx.where, ctx.input_dtype, ctx.chunks = where, x.dtype, chunks
        note_parameters(ctx, weight, bias)
        w = local_shard(weight)
        if dtype is not None:
            x, w = x.to(dtype), w.to(dtype)
        save_operands(ctx, x, w)
        if chunks > 1 and where is not None:
            with unwatched():
                out = reduced_product(x, w, where, chunks)
                return out if bias is None else out.add_(local_shard(bias))
        out = linear(x, w)
        if dispatch_modes() and selectively_checkpointed():
            with unwatched():  # it may have saved the product, which is reduced in place otherwise
                return _reduced(out.clone(), bias, where)
        return _reduced(out, bias, where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        first_order_only()
        x, w = ctx.saved_tensors
        needs_input = ctx.needs_input_grad[0]
        dx = None
        if isinstance(ctx.where, tuple):
            grad = grad.contiguous()
            if needs_input and ctx.chunks > 1:
                grad, dx = gathered_product(grad, w.t(), None, ctx.where, ctx.chunks)
            else:
                grad = gather_dim(grad, *ctx.where)
        if needs_input:
            dx = grad.matmul(w) if dx is None else dx
            if dx.dtype is not ctx.input_dtype:
                dx = dx.to(ctx.input_dtype)
        return dx, *weight_grads(ctx, grad, x), None, None, None

    @staticmethod
    def gradient_shares(ctx: Any) -> Sequence[int] | None:
        return ctx.where[0].ranks if isinstance(ctx.where, tuple) else None


class RowLinear(Lowered):
    """A row-wise Linear; plain sharded inputs and plain outputs take the shortest path."""

    __slots__ = ("chunks", "direct_in", "fast", "where")

    def resolve(self) -> None:
        self.chunks: int = chunks_of(self.sharding)
        self.direct_in: bool = self.port_in.layout == self.port_in.desired
        self.where: ShardedDim | None = sharded_dim(self.port_out.desired, self.comm)
        reduced = self.port_out.desired.is_replicate() and self.sharding.local_outputs
        self.fast: bool = self.direct_in and reduced and self.chunks == 1

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        x, placement = call.input(), call.sharding.output_port().desired
        chunked = {("all_reduce", False), ("reduce_scatter", False)}
        if x is not None and x.requires_grad:
            chunked.add(("all_gather", True))
        declared = [*declare_sharded_input(call), *declare_partial_output(call)]
        yield from in_chunks(declared, chunked, chunks_of(call.sharding), call.output, placement, call.ranks)

    def __call__(self, input: Tensor) -> Tensor:
        if is_compiling():
            weight: Any = self.local("weight")["weight"]
            input = sharded_input(self, input, input.ndim - 1, self.spec("weight").sizes(1))
            return partial_output(self, linear(input, weight), "bias")
        if type(input) is not Tensor or not self.fast or autocasting():
            return self.general(input)
        params = self.params
        try:
            weight, bias = params["weight"], params["bias"]
        except KeyError:  # one is computed since
            weight = bias = None
        if weight is None:
            return self.general(input)
        try:
            out: Tensor = apply(_RowProduct, input, weight, bias, self.comm, None)
        except RuntimeError:
            self.check_features(input, spec_of(weight, "weight"))
            raise
        return out

    def check_features(self, input: Tensor, spec: Spec) -> None:
        """Raise LayoutError if an input does not hold this rank's features."""
        size = spec.local_shape[1]
        if input.ndim == 0 or input.shape[-1] != size:
            raise LayoutError(
                f"{self.sharding.style}: a plain input is this rank's shard, with {size} of {spec.shape[1]} features "
                f"in its last dim, got shape {tuple(input.shape)}. Give input_layouts=Replicate() if every rank holds "
                "all of them, or shard the module before it with ColwiseParallel()"
            )

    def general(self, input: Tensor) -> Tensor:
        """DTensor inputs, other layouts and autocast."""
        weight, bias = self.parameter("weight"), self.parameter("bias")
        spec = spec_of(weight, "weight")
        dtype = autocast_dtype(input)
        local = sharded_input(self, input, input.ndim - 1, spec.sizes(1))
        where = self.target(local.shape)
        if where is None:
            return partial_output(self, apply(_RowProduct, local, weight, None, None, dtype), bias)
        out: Tensor = apply(_RowProduct, local, weight, bias, where, dtype, self.chunks if local.ndim > 1 else 1)
        if self.sharding.local_outputs:
            return out
        return from_local(out, self.port_out.desired, self.mesh, None)

    def target(self, shape: torch.Size) -> Comm | ShardedDim | None:
        """Communicator, or sharded dim, over which the partial output is reduced; None where that is not all."""
        if self.port_out.desired.is_replicate():
            return self.comm
        if self.where is None:
            return None
        comm, dim, sizes = self.where
        dim = dim + len(shape) if dim < 0 else dim
        if dim >= len(shape) - 1:
            return None
        if sizes is None and shape[dim] % comm.size:
            if self.sharding.local_outputs:
                raise uneven_output(self.sharding.style, shape[dim], dim, comm)
            return None
        return comm, dim, sizes
