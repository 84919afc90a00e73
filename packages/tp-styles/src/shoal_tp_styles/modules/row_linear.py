"""Linear layers sharded by input features (rows), on local tensors with explicit collectives.

x: S(-1) -> y: R        all-reduce of y; backward: nothing
x: S(-1) -> y: S(d)     reduce-scatter of y; backward: all-gather of dy

`OverlappedRow` splits the activation into chunks of dim 0 ("async TP", on any backend): while the partial output of one
chunk is reduced, the next chunk is multiplied.  The values are those of the unchunked product; there are as many
collectives as chunks.  Where the output is scattered along dim 0, a chunk holds some rows of every rank's shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor import DTensor, Shard, Spec, local_shard
from shoal_mesh import Comm, all_reduce_

from .._torch import (
    apply,
    autocast_dtype,
    autocasting,
    direct,
    dispatch_modes,
    is_compiling,
    selectively_checkpointed,
    split_sizes,
    transforming,
    unwatched,
)
from ..errors import LayoutError
from ..lowering.boundary import from_local, local_input, local_output, output_dtensor
from ..lowering.collective_functions import (
    ShardedDim,
    gather_dim,
    reduce_scatter_dim,
    sharded_dim,
    split,
    uneven_output,
)
from ..lowering.lowered import Lowered, spec_of
from ..lowering.parameters import first_order_only
from ..lowering.ports import declare_partial_output, declare_sharded_input, partial_output, sharded_input
from ..sharding.collective import Collective
from ..sharding.module_sharding import ModuleCall, Overlap
from .linear_gradients import note_parameters, save_operands, weight_grads

__all__ = ["OverlappedRow", "RowLinear"]

_REDUCTIONS = ("all_reduce", "reduce_scatter")  # what runs in chunks

Grads = tuple[Any, ...]


def _save_for_row(
    ctx: Any,
    x: Tensor,
    weight: DTensor,
    bias: DTensor | None,
    where: Comm | ShardedDim | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Keep what the backward needs; returns input and local weight in the dtype of the product."""
    ctx.where, ctx.input_dtype = where, x.dtype
    note_parameters(ctx, weight, bias)
    w = local_shard(weight)
    if dtype is not None:
        x, w = x.to(dtype), w.to(dtype)
    save_operands(ctx, x, w)
    return x, w


def _row_backward(ctx: Any, grad: Tensor) -> Grads:
    """Gradients of input, weight and bias from the replicated gradient of the output."""
    first_order_only()
    x, w = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0]:
        dx = grad.matmul(w)
        if dx.dtype is not ctx.input_dtype:
            dx = dx.to(ctx.input_dtype)
    return dx, *weight_grads(ctx, grad, x)


def _finished(out: Tensor, bias: DTensor | None, where: Comm | ShardedDim | None) -> Tensor:
    """The product, reduced (in place where it is all-reduced), and the bias."""
    if type(where) is Comm:
        all_reduce_(out, where)
    elif isinstance(where, tuple):
        out = reduce_scatter_dim(out, *where)
    if bias is not None:
        out += local_shard(bias)
    return out


class _Row(Function):
    """x: S(-1), W: S(1), b: R -> y: R (`where` is a communicator), S(d) (communicator, dim, sizes), or P (None).

    The bias is added once, after the reduction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: DTensor,
        bias: DTensor | None,
        where: Comm | ShardedDim | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        x, w = _save_for_row(ctx, x, weight, bias, where, dtype)
        out = linear(x, w)
        if (
            dispatch_modes() and selectively_checkpointed()
        ):  # it may have saved the product, which is reduced in place otherwise
            with unwatched():
                return _finished(out.clone(), bias, where)
        return _finished(out, bias, where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        if isinstance(ctx.where, tuple):
            grad = gather_dim(grad.contiguous(), *ctx.where)
        return (*_row_backward(ctx, grad), None, None)


_row_direct = direct(_Row)


class RowLinear(Lowered):
    """A row-wise Linear; plain sharded inputs and plain outputs take the shortest path."""

    __slots__ = ("direct_in", "fast", "where")

    def resolve(self) -> None:
        self.direct_in = self.port_in.layout == self.port_in.desired
        self.where = sharded_dim(self.port_out.desired, self.comm)
        self.fast = self.direct_in and self.port_out.desired.is_replicate() and self.sharding.local_outputs

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from declare_sharded_input(call)
        yield from declare_partial_output(call)

    def __call__(self, input: Tensor) -> Tensor:
        if is_compiling():
            return self.traced(input)
        if type(input) is not Tensor or not self.fast or autocasting() or transforming():
            return self.general(input)
        params = self.params
        try:
            weight, bias = params["weight"], params["bias"]
        except KeyError:  # one is computed since
            return self.general(input)
        try:
            out: Tensor = _row_direct(input, weight, bias, self.comm, None)
        except RuntimeError:
            self.check_features(input, spec_of(weight, "weight"))
            raise
        return out

    def check_features(self, input: Tensor, spec: Spec) -> None:
        """Raise LayoutError if an input does not hold this rank's features."""
        held = spec.local_shape[1]
        if input.ndim == 0 or input.shape[-1] != held:
            raise LayoutError(
                f"{self.sharding.style}: a plain input is this rank's shard, with {held} of {spec.shape[1]} features "
                f"in its last dim, got shape {tuple(input.shape)}. Give input_layouts=Replicate() if every rank holds "
                "all of them, or shard the module before it with ColwiseParallel()"
            )

    def traced(self, input: Tensor) -> Tensor:
        """The forward in terms that torch.compile follows."""
        sizes = self.spec("weight").sizes(1)
        weight: Any = self.local("weight")["weight"]
        input = sharded_input(self, input, input.ndim - 1, sizes)
        return partial_output(self, linear(input, weight), "bias")

    def general(self, input: Tensor) -> Tensor:
        """DTensor inputs, other layouts and autocast."""
        weight, bias = self.parameter("weight"), self.parameter("bias")
        spec = spec_of(weight, "weight")
        dtype = autocast_dtype(input)
        shape = list(input.shape)
        if not isinstance(input, DTensor) and self.direct_in:
            local = input
        elif not isinstance(input, DTensor) and self.port_in.layout.is_replicate():
            local = split(input, self.comm, input.ndim - 1, spec.sizes(1))
        else:
            local = local_input(input, self.port_in, self.mesh, grad=self.port_in.desired)
            shape = list(local.shape)
        where = self.target(shape, spec)
        if where is None:
            return self.by_dtensor(local, weight, bias, dtype)
        out = self.product(local, weight, bias, where, dtype)
        if self.sharding.local_outputs:
            return out
        return from_local(out, self.port_out.desired, self.mesh, None)

    def product(
        self, local: Tensor, weight: Any, bias: Any, where: Comm | ShardedDim, dtype: torch.dtype | None
    ) -> Tensor:
        """The reduced product of the local shards, and the bias."""
        out: Tensor = apply(_Row, local, weight, bias, where, dtype)
        return out

    def target(self, shape: list[int], spec: Spec) -> Comm | ShardedDim | None:
        """Communicator, or sharded dim, over which the partial output is reduced; None where DTensor must do it."""
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

    def by_dtensor(self, local: Tensor, weight: Any, bias: Any, dtype: torch.dtype | None) -> Tensor:
        """Partial product, redistributed as a DTensor, then the bias."""
        partial: Tensor = apply(_Row, local, weight, None, None, dtype)
        left = output_dtensor(partial, self.port_out, self.mesh)
        if bias is not None:
            left = left + (bias if dtype is None else bias.to(dtype))
            left = output_dtensor(left, self.port_out, self.mesh)
        return local_output(left, self.sharding.style) if self.sharding.local_outputs else left


class _OverlappedRow(Function):
    """x: S(-1), W: S(1), b: R -> y: R | S(d), chunk by chunk along dim 0."""

    @staticmethod
    def forward(  # noqa: PLR0913  # what autograd hands over
        ctx: Any,
        x: Tensor,
        weight: DTensor,
        bias: DTensor | None,
        where: Comm | ShardedDim,
        dtype: torch.dtype | None,
        chunks: int,
    ) -> Tensor:
        x, w = _save_for_row(ctx, x, weight, bias, where, dtype)
        if selectively_checkpointed():
            with unwatched():
                return _in_chunks(x, w, bias, where, chunks)
        return _in_chunks(x, w, bias, where, chunks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if isinstance(ctx.where, tuple):
            grad = gather_dim(grad.contiguous(), *ctx.where)
        return (*_row_backward(ctx, grad), None, None, None)


def _in_chunks(x: Tensor, w: Tensor, bias: DTensor | None, where: Comm | ShardedDim, chunks: int) -> Tensor:
    """The reduced product, and the bias; each chunk is reduced beside the product of the next."""
    pending = []
    for rows, target in _chunks(x, where, chunks):
        out = linear(rows, w)
        if isinstance(target, tuple):
            pending.append(reduce_scatter_dim(out, *target, async_op=True))
        else:
            pending.append(all_reduce_(out, target, async_op=True))
    full = torch.cat([each.wait() for each in pending])
    if bias is not None:
        full += local_shard(bias)
    return full


def _chunks(x: Tensor, where: Comm | ShardedDim, chunks: int) -> Iterator[tuple[Tensor, Comm | ShardedDim]]:
    """Rows of `x`, and how their products are reduced, so that the results are in order."""
    if not isinstance(where, tuple) or where[1] != 0:
        for rows in x.tensor_split(_count(chunks, x.shape[0])):
            yield rows, where
        return
    comm, dim, sizes = where
    shards = split_sizes(x, [x.shape[0] // comm.size] * comm.size if sizes is None else list(sizes))
    count = _count(chunks, max(len(shard) for shard in shards))
    for parts in zip(*(shard.tensor_split(count) for shard in shards), strict=True):
        yield torch.cat(parts), (comm, dim, None if sizes is None else tuple(map(len, parts)))


def _count(chunks: int, rows: int) -> int:
    return max(1, min(chunks, rows))


class OverlappedRow(RowLinear):
    """A row-wise Linear of a style with `.overlapped(chunks)`."""

    __slots__ = ("chunks",)

    def resolve(self) -> None:
        super().resolve()
        options = self.sharding.options
        assert isinstance(options, Overlap), "the style gave the number of chunks"
        self.chunks = options.chunks

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        options, placement, out = call.sharding.options, call.sharding.output_port().desired, call.output
        chunks = 1
        if isinstance(options, Overlap) and out.ndim > 1:
            rows = out.shape[0]
            if isinstance(placement, Shard) and placement.dim in (0, -out.ndim):
                rows = rows // call.ranks if placement.sizes is None else max(placement.sizes)
            chunks = _count(options.chunks, rows)
        for collective in super().collectives(call):
            split = 1 if collective.backward or collective.op not in _REDUCTIONS else chunks
            yield from [replace(collective, nbytes=collective.nbytes // split)] * split

    def __call__(self, input: Tensor) -> Tensor:
        return self.traced(input) if is_compiling() else self.general(input)  # a compiler orders collectives itself

    def product(
        self, local: Tensor, weight: Any, bias: Any, where: Comm | ShardedDim, dtype: torch.dtype | None
    ) -> Tensor:
        if local.ndim < 2 or not local.numel():
            return super().product(local, weight, bias, where, dtype)
        out: Tensor = apply(_OverlappedRow, local, weight, bias, where, dtype, self.chunks)
        return out
