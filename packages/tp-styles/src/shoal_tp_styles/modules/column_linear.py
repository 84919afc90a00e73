"""Linear layers sharded by output features (columns), on local tensors with explicit collectives.

Type lines, per mesh axis (activations are plain local tensors):

    x: R    -> y: S(-1)     backward: all-reduce of dx (shared by all readers of x), beside dW
    x: S(d) -> y: S(-1)     all-gather of x; backward: reduce-scatter of dx, beside dW

`OverlappedColumn` gathers x in chunks of dim 0, that of the next beside the product of one.

The weight is a DTensor parameter: one autograd function works on its local shard, and its gradient is added to
`.grad` or returned to autograd as a DTensor of the same spec.  What is saved is what hand-written code saves: the input
(an alias) and the local weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor import DTensor, Partial
from shoal_dtensor.internal import first_order_only, is_compiling, local_shard, unwatched, whole_when_compiled
from shoal_mesh import Comm
from shoal_mesh.internal import all_reduce_

from .._torch import apply, autocast_dtype, autocasting, direct, transforming
from ..lowering.boundary import local_input
from ..lowering.collective_functions import (
    ShardedDim,
    copy,
    gather_dim,
    gather_partial,
    reduce_scatter_dim,
    sharded_dim,
)
from ..lowering.lowered import Lowered, spec_of
from ..lowering.overlap import chunks_of, gathered_product, in_chunks
from ..lowering.parameters import check_plain
from ..lowering.ports import declare_replicated_input, declare_sharded_output, replicated_input, sharded_output
from ..lowering.shared_input import find_token, keep_token
from ..sharding.collective import Collective
from ..sharding.module_sharding import ModuleCall
from .linear_gradients import cast, note_parameters, save_operands, weight_grads

Grads = tuple[Any, ...]

OVERLAP_FROM = 1 << 20
"""Multiplications of a weight gradient on a CPU from which the reduction of dx runs beside it: some 50 us."""


def _operands(
    ctx: Any, weight: DTensor, bias: DTensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Local weight and bias in the dtype of the product, which are noted for the backward."""
    note_parameters(ctx, weight, bias)
    w = local_shard(weight)
    b = None if bias is None else local_shard(bias)
    if dtype is not None:
        w, b = w.to(dtype), cast(b, dtype)
    return w, b


class _Column(Function):
    """x, W: S(0), b: S(0) -> y: S(-1).  The gradient of x is all-reduced over `comm`; None leaves it partial."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: DTensor, bias: DTensor | None, comm: Comm | None, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.comm = comm
        ctx.input_dtype = x.dtype
        if dtype is not None:
            x = x.to(dtype)
        w, b = _operands(ctx, weight, bias, dtype)
        out = linear(x, w, b)
        save_operands(ctx, x, w)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        return (*_column_backward(ctx, grad, None), None, None)


class _LeadColumn(Function):
    """`_Column` that also returns the token on which the other readers of x run (`shared_input`)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: DTensor, bias: DTensor | None, comm: Comm, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        ctx.comm = comm
        ctx.input_dtype = x.dtype
        ctx.set_materialize_grads(False)
        token = x.detach()
        local = token if dtype is None else token.to(dtype)
        w, b = _operands(ctx, weight, bias, dtype)
        out = linear(local, w, b)
        save_operands(ctx, local, w)
        return out, token

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, others: Tensor | None) -> Grads:
        return (*_column_backward(ctx, grad, others), None, None)


def overlaps(dx: Tensor, w: Tensor) -> bool:
    """Whether the reduction of dx runs beside the weight gradient, rather than before it.

    On a CPU a small product is done before the thread that communicates has woken up, and waking it costs more.
    """
    return dx.device.type != "cpu" or dx.numel() * w.shape[0] >= OVERLAP_FROM


def _column_backward(ctx: Any, grad: Tensor | None, others: Tensor | None) -> Grads:
    first_order_only()
    x, w = ctx.saved_tensors
    pending = None
    dx = others
    if ctx.needs_input_grad[0]:
        if grad is not None:
            dx = grad.matmul(w)
            if dx.dtype is not ctx.input_dtype:
                dx = dx.to(ctx.input_dtype)
            if others is not None:
                dx += others
        elif others is not None and ctx.comm is not None:
            dx = others.clone()
        if ctx.comm is not None and dx is not None:
            if overlaps(dx, w):
                pending = all_reduce_(dx, ctx.comm, async_op=True)
            else:
                all_reduce_(dx, ctx.comm)
    dw, db = (None, None) if grad is None else weight_grads(ctx, grad, x)
    if pending is not None:
        pending.wait()
    return dx, dw, db


class _GatherColumn(Function):
    """x: S(dim), W: S(0), b: S(0) -> y: S(-1), and the gathered x as the token of the other readers."""

    @staticmethod
    def forward(  # noqa: PLR0913  # what autograd hands over
        ctx: Any,
        x: Tensor,
        weight: DTensor,
        bias: DTensor | None,
        where: ShardedDim,
        dtype: torch.dtype | None,
        chunks: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.where, ctx.input_dtype = where, x.dtype
        ctx.set_materialize_grads(False)
        w, b = _operands(ctx, weight, bias, dtype)
        local = x if dtype is None else x.to(dtype)
        with unwatched():
            if chunks > 1:
                gathered, out = gathered_product(local, w, b, where, chunks)
            else:
                gathered = gather_dim(local, *where)
        if chunks == 1:
            out = linear(gathered, w, b)
        save_operands(ctx, gathered, w)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(gathered)
        return out, gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, others: Tensor | None) -> Grads:
        first_order_only()
        x, w = ctx.saved_tensors
        reduced: Any = None
        if ctx.needs_input_grad[0]:
            partial: Any = others if grad is None else grad.matmul(w)
            if grad is not None and others is not None:
                partial += others
            reduced = reduce_scatter_dim(partial, *ctx.where, async_op=overlaps(partial, w))
        dw, db = (None, None) if grad is None else weight_grads(ctx, grad, x)
        dx = reduced if reduced is None or isinstance(reduced, Tensor) else reduced.wait()
        if dx is not None and dx.dtype is not ctx.input_dtype:
            dx = dx.to(ctx.input_dtype)
        return dx, dw, db, None, None, None


def _column(x: Tensor, weight: Any, bias: Any, comm: Comm | None, dtype: torch.dtype | None) -> Tensor:
    out: Tensor = _Column.apply(x, weight, bias, comm, dtype)  # type: ignore[no-untyped-call]  # torch
    return out


_column_direct, _lead_direct = direct(_Column), direct(_LeadColumn)


@whole_when_compiled
def _gathered_product(x: Tensor, weight: Tensor, bias: Tensor | None, comm: Comm, where: ShardedDim | None) -> Tensor:
    """x: R | S(d) -> y: S(-1), on local shards."""
    return linear(copy(x, comm) if where is None else gather_partial(x, *where), weight, bias)


class ColumnLinear(Lowered):
    """A column-wise Linear; plain replicated inputs take the shortest path."""

    __slots__ = ("finished", "key", "plain", "traceable", "where")
    chunks = 1

    def resolve(self) -> None:
        replicated = self.port_in.layout.is_replicate()
        self.key: tuple[Comm, None, None] = (self.comm, None, None)
        self.where: ShardedDim | None = sharded_dim(self.port_in.layout, self.comm)
        # Whether the local product leaves the module as it is.
        self.finished: bool = self.sharding.local_outputs and self.port_out.layout == self.port_out.desired
        self.plain: bool = replicated and self.finished
        self.traceable: bool = replicated or self.where is not None

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from declare_replicated_input(call)
        yield from declare_sharded_output(call)

    def __call__(self, input: Tensor) -> Tensor:
        if is_compiling():
            return self.finish(self.traced(input))
        if type(input) is not Tensor or not self.plain or autocasting() or transforming():
            return self.finish(self.general(input))
        params = self.params
        try:
            weight, bias = params["weight"], params["bias"]
        except KeyError:  # one is computed since
            weight = bias = None
        if weight is None:
            return self.finish(self.general(input))
        if not torch.is_grad_enabled():
            if type(weight) is not DTensor:
                check_plain(weight)
            return linear(input, local_shard(weight), None if bias is None else local_shard(bias))
        if not input.requires_grad:
            plain: Tensor = _column_direct(input, weight, bias, None, None)
            return plain
        if input.is_leaf:
            alone: Tensor = _column_direct(input, weight, bias, self.comm, None)
            return alone
        token = find_token(input, self.key, grad=True)
        if token is not None:
            shared: Tensor = _column_direct(token, weight, bias, None, None)
            return shared
        out: Tensor
        out, token = _lead_direct(input, weight, bias, self.comm, None)
        keep_token(input, self.key, token)
        return out

    def traced(self, input: Tensor) -> Tensor:
        """The local product in terms that torch.compile follows."""
        weight: Any = self.shard("weight")
        bias = self.shard("bias")
        if input.__class__ is Tensor and self.traceable:  # for `type(input)` Dynamo adds a guard in Python
            return _gathered_product(input, weight, bias, self.comm, self.where)
        return linear(replicated_input(self, input), weight, bias)

    def replicated(self, input: Tensor, weight: Any, bias: Any, dtype: torch.dtype | None) -> Tensor:
        """One reader, among possibly several, of a replicated activation."""
        if input.is_leaf or not torch.is_grad_enabled():
            return _column(input, weight, bias, self.comm, dtype)
        token = find_token(input, self.key, grad=True)
        if token is not None:
            return _column(token, weight, bias, None, dtype)
        out: Tensor
        out, token = _LeadColumn.apply(input, weight, bias, self.comm, dtype)  # type: ignore[no-untyped-call]  # torch
        if token.requires_grad:
            keep_token(input, self.key, token)
        return out

    def gathered(self, input: Tensor, where: ShardedDim, weight: Any, bias: Any, dtype: torch.dtype | None) -> Tensor:
        """One reader, among possibly several, of an activation sharded along another dim; gathered once."""
        key = (*where, dtype)
        grad = input.requires_grad and torch.is_grad_enabled()
        token = find_token(input, key, grad)
        if token is not None:
            return _column(token, weight, bias, None, dtype)
        out: Tensor
        out, token = apply(_GatherColumn, input, weight, bias, where, dtype, self.chunks if input.ndim > 1 else 1)
        if not (grad and input.is_leaf):
            keep_token(input, key, token)
        return out

    def general(self, input: Tensor) -> Tensor:
        """The local product for DTensor inputs, other layouts and autocast."""
        weight, bias = self.parameter("weight"), self.parameter("bias")
        spec_of(weight, "weight")
        dtype = autocast_dtype(input)
        if not isinstance(input, DTensor):
            if self.port_in.layout.is_replicate():
                return self.replicated(input, weight, bias, dtype)
            if self.where is not None:
                return self.gathered(input, self.where, weight, bias, dtype)
        elif self.chunks > 1 and input.device_mesh == self.mesh:
            (placement,) = input.placements
            where = sharded_dim(placement, self.comm)
            if where is not None:
                local = input.to_local(grad_placements=(placement,))
                return self.gathered(local, (*where[:2], input.spec.sizes(where[1])), weight, bias, dtype)
        local = local_input(input, self.port_in, self.mesh, grad=Partial())
        return _column(local, weight, bias, None, dtype)

    def finish(self, out: Tensor) -> Tensor:
        """The output in the layout that leaves the module."""
        if self.finished:
            return out
        spec = self.spec("weight")
        return sharded_output(self, out, out.ndim - 1, spec.shape[0], spec.sizes(0))


class OverlappedColumn(ColumnLinear):
    """A column-wise Linear of a style with `.overlapped(chunks)`."""

    __slots__ = ("chunks",)

    def resolve(self) -> None:
        super().resolve()
        self.chunks: int = chunks_of(self.sharding)

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        x, placement = call.input(), call.sharding.input_port().layout
        declared = declare_replicated_input(call)
        if x is not None:
            chunks = chunks_of(call.sharding)
            declared = in_chunks(declared, {("all_gather", False)}, chunks, x, placement, call.ranks)
        yield from declared
        yield from declare_sharded_output(call)
