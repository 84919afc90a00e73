"""Linear layers sharded by output features (columns), on local tensors with explicit collectives.

Type lines, per mesh axis (activations are plain local tensors):

    x: R    -> y: S(-1)     backward: all-reduce of dx (shared by all readers of x), beside dW
    x: S(d) -> y: S(-1)     all-gather of x; backward: reduce-scatter of dx, beside dW

Under a style with `.overlapped(chunks)` x is gathered in chunks of dim 0, the next beside the product of one.

The weight is a DTensor parameter: one autograd function works on its local shard, and its gradient is added to
`.grad` or returned to autograd as a DTensor of the same spec.  What is saved is what hand-written code saves: the input
(an alias) and the local weight.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor import DTensor, Partial
from shoal_dtensor.internal import apply, first_order_only, is_compiling, local_shard, unwatched
from shoal_mesh import Comm
from shoal_mesh.internal import Pending, all_reduce_

from .._torch import autocast_dtype, autocasting
from ..lowering.boundary import local_input
from ..lowering.collective_functions import (
    ShardedDim,
    find_token,
    gather_dim,
    keep_token,
    reduce_scatter_dim,
    sharded_dim,
)
from ..lowering.lowered import Lowered, spec_of
from ..lowering.overlap import chunks_of, gathered_product, in_chunks
from ..lowering.parameters import check_plain, note_parameters, save_operands, weight_grads
from ..lowering.ports import declare_replicated_input, declare_sharded_output, replicated_input, sharded_output
from ..sharding.module_sharding import Collective, ModuleCall

Grads = tuple[Any, ...]

OVERLAP_FROM = 1 << 20
"""Multiplications of a weight gradient on a CPU from which the reduction of dx runs beside it: some 50 us."""


def overlaps(dx: Tensor, w: Tensor) -> bool:
    """Whether the reduction of dx runs beside the weight gradient, rather than before it.

    On a CPU a small product is done before the thread that communicates has woken up, and waking it costs more.
    """
    return dx.device.type != "cpu" or dx.numel() * w.shape[0] >= OVERLAP_FROM


class _ColumnProduct(Function):
    """W: S(0), b: S(0) -> y: S(-1), of an input that `where` tells about.

        None                 x: R       its gradient stays partial
        communicator         x: R       its gradient is all-reduced
        (comm, dim, sizes)   x: S(dim)  gathered, in chunks beside their products; its gradient is reduce-scattered

    The leader of several readers returns x: R too, the token on which the others run (`shared_input`).
    """

    @staticmethod
    def forward(  # noqa: PLR0913  # what autograd hands over
        ctx: Any,
        x: Tensor,
        weight: DTensor,
        bias: DTensor | None,
        where: Comm | ShardedDim | None,
        dtype: torch.dtype | None,
        leads: bool = False,
        chunks: int = 1,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.where, ctx.input_dtype = where, x.dtype
        note_parameters(ctx, weight, bias)
        w, b = local_shard(weight), None if bias is None else local_shard(bias)
        if dtype is not None:
            w, b = w.to(dtype), None if b is None else b.to(dtype)
        out = None
        if isinstance(where, tuple):
            token = x if dtype is None else x.to(dtype)
            with unwatched():
                if chunks > 1:
                    token, out = gathered_product(token, w, b, where, chunks)
                else:
                    token = gather_dim(token, *where)
        else:
            token = x.detach() if leads else x
        local = token if dtype is None else token.to(dtype)
        if out is None:
            out = linear(local, w, b)
        save_operands(ctx, local, w)
        if not leads:
            return out
        ctx.set_materialize_grads(False)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(token)
        return out, token

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, others: Tensor | None = None) -> Grads:
        first_order_only()
        x, w = ctx.saved_tensors
        reduced: Any = None
        if ctx.needs_input_grad[0]:
            reduced = _reduced_gradient(ctx, grad, others, w)
        dw, db = (None, None) if grad is None else weight_grads(ctx, grad, x)
        dx = reduced.wait() if isinstance(reduced, Pending) else reduced
        if dx is not None and dx.dtype is not ctx.input_dtype:
            dx = dx.to(ctx.input_dtype)
        return dx, dw, db, None, None, None, None

    @staticmethod
    def gradient_shares(ctx: Any) -> Sequence[int]:
        comm: Comm | None = ctx.where[0] if isinstance(ctx.where, tuple) else ctx.where
        return () if comm is None else comm.ranks  # none: those of the token, or of x


def _reduced_gradient(ctx: Any, grad: Tensor | None, others: Tensor | None, w: Tensor) -> Tensor | Pending | None:
    """The gradient of x, reduced as `where` says, or its reduction that is under way.

    `others` are the partial gradients of the other readers together, `grad` is that of the output, (..., out).
    """
    where = ctx.where
    if grad is None:
        dx = others.clone() if others is not None and type(where) is Comm else others  # it is reduced in place
    else:
        dx = grad.matmul(w)
        # The token of a gathered x, and so the gradient of its readers, is in the dtype of the product.
        if not isinstance(where, tuple) and dx.dtype is not ctx.input_dtype:
            dx = dx.to(ctx.input_dtype)
        if others is not None:
            dx += others
    if dx is None or where is None:
        return dx
    if isinstance(where, tuple):
        scattered: Tensor | Pending = reduce_scatter_dim(dx, *where, async_op=overlaps(dx, w))
        return scattered
    return all_reduce_(dx, where, async_op=True) if overlaps(dx, w) else all_reduce_(dx, where)


class ColumnLinear(Lowered):
    """A column-wise Linear; plain replicated inputs take the shortest path."""

    __slots__ = ("chunks", "finished", "plain", "where")

    def resolve(self) -> None:
        replicated = self.port_in.layout.is_replicate()
        self.where: Comm | ShardedDim | None = self.comm if replicated else sharded_dim(self.port_in.layout, self.comm)
        self.chunks: int = chunks_of(self.sharding)
        # Whether the local product leaves the module as it is.
        self.finished: bool = self.sharding.local_outputs and self.port_out.layout == self.port_out.desired
        self.plain: bool = replicated and self.finished

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        x, placement = call.input(), call.sharding.input_port().layout
        declared = declare_replicated_input(call)
        if x is not None:
            chunks = chunks_of(call.sharding)
            declared = in_chunks(declared, {("all_gather", False)}, chunks, x, placement, call.ranks)
        yield from declared
        yield from declare_sharded_output(call)

    def __call__(self, input: Tensor) -> Tensor:
        if is_compiling():
            local: Any = self.local("weight", "bias")
            return self.finish(linear(replicated_input(self, input), local["weight"], local["bias"]))
        if type(input) is not Tensor or not self.plain or autocasting():
            return self.finish(self.general(input))
        params = self.params
        try:
            weight, bias = params["weight"], params["bias"]
        except KeyError:  # one is computed since
            weight = bias = None
        if weight is None:
            return self.finish(self.general(input))
        out: Tensor
        if not torch.is_grad_enabled():
            if type(weight) is not DTensor:
                check_plain(weight)
            out = linear(input, local_shard(weight), None if bias is None else local_shard(bias))
        elif input.is_leaf:  # not shared with other readers
            out = apply(_ColumnProduct, input, weight, bias, self.comm, None)
        else:
            out = self.product(input, self.comm, weight, bias, None)
        return out

    def product(self, input: Tensor, where: Comm | ShardedDim, weight: Any, bias: Any, dtype: Any) -> Tensor:
        """One reader, among possibly several, of an activation: they gather it once, and reduce its gradient once.

        `dtype` is that of the product where autocast has one.
        """
        out: Tensor
        grad = input.requires_grad and torch.is_grad_enabled()
        if isinstance(where, tuple):
            key: Hashable = (*where, dtype)  # the token is in the dtype of the product
            alone = input.is_leaf and grad
        else:
            key = (where, None, None)
            alone = input.is_leaf or not grad
        token = None if alone else find_token(input, key, grad)
        if token is not None:
            out = apply(_ColumnProduct, token, weight, bias, None, dtype)
            return out
        chunks = self.chunks if input.ndim > 1 else 1
        if alone:
            out = apply(_ColumnProduct, input, weight, bias, where, dtype, False, chunks)
            return out
        out, token = apply(_ColumnProduct, input, weight, bias, where, dtype, True, chunks)
        keep_token(input, key, token)
        return out

    def general(self, input: Tensor) -> Tensor:
        """The local product for DTensor inputs, other layouts and autocast."""
        weight, bias = self.parameter("weight"), self.parameter("bias")
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
        out: Tensor = apply(_ColumnProduct, local, weight, bias, None, dtype)
        return out

    def finish(self, out: Tensor) -> Tensor:
        """The output in the layout that leaves the module."""
        if self.finished:
            return out
        spec = self.spec("weight")
        return sharded_output(self, out, out.ndim - 1, spec.shape[0], spec.sizes(0))
