"""Linear layers cut by rows, on local tensors with explicit collectives.

x: S(-1) -> y: R        all-reduce of y; backward: nothing
x: S(-1) -> y: S(d)     reduce-scatter of y; backward: all-gather of dy
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor import DTensor, Spec
from shoal_mesh import Comm, all_reduce_

from .._torch import apply, autocast_dtype, autocasting, direct, is_compiling, transforming
from .boundary import arrive_local, leave, leave_local, wrap_like
from .enter import enter
from .forward import Lowered, spec_of
from .gradients import first_order_only
from .linear import note, save, weight_grads
from .ports import arrive_cut, leave_partial
from .regions import Where, axis_dim, gather_blocks, scatter_blocks, split, uneven

__all__ = ["RowLinear", "row_backward", "save_for_row"]

Grads = tuple[Any, ...]


def save_for_row(
    ctx: Any, x: Tensor, weight: DTensor, bias: DTensor | None, where: Comm | Where | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Note on `ctx` what the backward of rows needs; gives input and local weight in the dtype of the product."""
    ctx.where, ctx.came_as = where, x.dtype
    note(ctx, weight, bias)
    w = weight._local_tensor
    if dtype is not None:
        x, w = x.to(dtype), w.to(dtype)
    save(ctx, x, w)
    return x, w


def row_backward(ctx: Any, grad: Tensor) -> Grads:
    """Gradients of input, weight and bias from the whole gradient of the output."""
    first_order_only()
    x, w = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0]:
        dx = grad.matmul(w)
        if dx.dtype is not ctx.came_as:
            dx = dx.to(ctx.came_as)
    return dx, *weight_grads(ctx, grad, x)


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
        where: Comm | Where | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        x, w = save_for_row(ctx, x, weight, bias, where, dtype)
        out = linear(x, w)
        if type(where) is Comm:
            all_reduce_(out, where)
        elif isinstance(where, tuple):
            out = scatter_blocks(out, *where)
        if bias is not None:
            out += bias._local_tensor
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        if isinstance(ctx.where, tuple):
            grad = gather_blocks(grad.contiguous(), *ctx.where)
        return (*row_backward(ctx, grad), None, None)


_row_direct = direct(_Row)


class RowLinear(Lowered):
    """Stand-in for the forward of a row-wise Linear; plain cut inputs and plain outputs take the shortest way."""

    __slots__ = ("direct_in", "direct_out", "fast", "where")

    def resolve(self) -> None:
        self.direct_in = self.port_in.layout == self.port_in.desired
        self.where = axis_dim(self.port_out.desired, self.comm)
        self.direct_out = self.where is not None or self.port_out.desired.is_replicate()
        self.fast = self.direct_in and self.port_out.desired.is_replicate() and self.sharding.local_outputs

    def __call__(self, input: Tensor) -> Tensor:
        if is_compiling():
            return self.traced(input)
        if type(input) is not Tensor or not self.fast or autocasting() or transforming():
            return self.general(input)
        params = self.params
        out: Tensor = _row_direct(input, params["weight"], params["bias"], self.comm, None)
        return out

    def traced(self, input: Tensor) -> Tensor:
        """The whole forward in terms that torch.compile follows."""
        sizes = spec_of(self.params["weight"], "weight").sizes(1)
        weight: Any = enter({"weight": self.params["weight"]})["weight"]
        input = arrive_cut(self, input, input.ndim - 1, sizes)
        return leave_partial(self, linear(input, weight), self.params["bias"])

    def general(self, input: Tensor) -> Tensor:
        """DTensor inputs, other layouts and autocast."""
        params = self.params
        weight, bias = params["weight"], params["bias"]
        spec = spec_of(weight, "weight")
        dtype = autocast_dtype(input)
        shape = list(input.shape)
        if not isinstance(input, DTensor) and self.direct_in:
            local = input
        elif not isinstance(input, DTensor) and self.port_in.layout.is_replicate():
            local = split(input, self.comm, input.ndim - 1, spec.sizes(1))
        else:
            local = arrive_local(input, self.port_in, self.mesh, grad=self.port_in.desired)
            shape = list(local.shape)
        where = self.target(shape, spec)
        if where is None:
            return self.by_dtensor(local, weight, bias, dtype)
        out: Tensor = apply(_Row, local, weight, bias, where, dtype)
        if self.sharding.local_outputs:
            return out
        return wrap_like(out, self.port_out.desired, self.mesh, None)

    def target(self, shape: list[int], spec: Spec) -> Comm | Where | None:
        """The collective that brings the partial output where it is wanted; None where DTensor must do it."""
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
                raise uneven(self.sharding.kind, shape[dim], dim, comm)
            return None
        return comm, dim, sizes

    def by_dtensor(self, local: Tensor, weight: Any, bias: Any, dtype: torch.dtype | None) -> Tensor:
        """Partial product, redistributed as a DTensor, then the bias."""
        partial: Tensor = apply(_Row, local, weight, None, None, dtype)
        left = leave(partial, self.port_out, self.mesh)
        if bias is not None:
            left = left + (bias if dtype is None else bias.to(dtype))
            left = leave(left, self.port_out, self.mesh)
        return leave_local(left) if self.sharding.local_outputs else left
