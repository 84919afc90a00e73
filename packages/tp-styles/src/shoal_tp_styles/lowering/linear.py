"""Linear layers cut by columns, on local tensors with explicit collectives (rows: `rows.py`).

Type lines, per mesh axis (activations are plain local tensors):

    columns   x: R    -> y: S(-1)     backward: all-reduce of dx (shared by all readers of x), beside dW
    columns   x: S(d) -> y: S(-1)     all-gather of x; backward: reduce-scatter of dx, beside dW

The weight is a DTensor parameter: one autograd function works on its local part, and its gradient goes
straight into `.grad` or back to autograd as a DTensor of the same spec (`gradients.py`).  What is saved is
what hand-written code saves: the input (an alias) and the local weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor import DTensor, Partial
from shoal_mesh import Comm, all_reduce_

from .._torch import apply, autocast_dtype, autocasting, direct, is_compiling, transforming
from .boundary import arrive_local
from .enter import enter
from .forward import Lowered, spec_of
from .gradients import SKIP, course, first_order_only, settle
from .ports import arrive_whole, leave_cut
from .regions import Where, axis_dim, gather_blocks, scatter_blocks
from .share import find_token, keep_token

__all__ = ["ColumnLinear", "note", "save", "weight_grads"]

Grads = tuple[Any, ...]

WORTH_OVERLAPPING = 1 << 20
"""Multiplications of a weight gradient, on a CPU, from which its input's reduction runs beside it: some 50 us."""


def _cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return tensor if tensor is None or dtype is None else tensor.to(dtype)


def weight_grads(ctx: Any, grad: Tensor, x: Tensor) -> tuple[DTensor | None, DTensor | None]:
    """Gradients of weight and bias from local dy and x; None for those that went straight into `.grad`."""
    _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    weight_grad = bias_grad = None
    if not needs_weight and not needs_bias:
        return None, None
    weight, bias = ctx.params
    weight_spec, bias_spec = ctx.specs
    edges = ctx.next_functions
    if grad.ndim != 2:
        grad = grad.reshape(-1, grad.shape[-1])
    if needs_weight:
        how = course(edges[1][0], weight)
        if how != SKIP:
            if x.ndim != 2:
                x = x.reshape(-1, x.shape[-1])
            weight_grad = settle(how, weight, weight_spec, grad.t().mm(x))
    if needs_bias:
        how = course(edges[2][0], bias)
        if how != SKIP:
            bias_grad = settle(how, bias, bias_spec, grad.sum(0))
    return weight_grad, bias_grad


def note(ctx: Any, weight: DTensor, bias: DTensor | None) -> None:
    """Keep the parameters for the backward, and how they lie now."""
    ctx.params = weight, bias
    ctx.specs = weight._spec, None if bias is None else bias._spec


def _start(
    ctx: Any, x: Tensor, weight: DTensor, bias: DTensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """What the forward of columns has in common: (output, local weight)."""
    note(ctx, weight, bias)
    w = weight._local_tensor
    b = None if bias is None else bias._local_tensor
    if dtype is not None:
        w, b = w.to(dtype), _cast(b, dtype)
    return linear(x, w, b), w


def save(ctx: Any, x: Tensor, w: Tensor) -> None:
    """Keep what the backward reads: a frozen weight needs no input, an input without gradient no weight."""
    needs_input, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if needs_weight else None, w if needs_input else None)


class _Column(Function):
    """x, W: S(0), b: S(0) -> y: S(-1).  The gradient of x is all-reduced over `comm`; None leaves it partial."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: DTensor, bias: DTensor | None, comm: Comm | None, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.comm = comm
        ctx.came_as = x.dtype
        if dtype is not None:
            x = x.to(dtype)
        out, w = _start(ctx, x, weight, bias, dtype)
        save(ctx, x, w)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        return (*_column_backward(ctx, grad, None), None, None)


class _LeadColumn(Function):
    """`_Column` that also gives the token on which the other readers of x run (see `share.py`)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: DTensor, bias: DTensor | None, comm: Comm, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        ctx.comm = comm
        ctx.came_as = x.dtype
        ctx.set_materialize_grads(False)
        token = x.detach()
        local = token if dtype is None else token.to(dtype)
        out, w = _start(ctx, local, weight, bias, dtype)
        save(ctx, local, w)
        return out, token

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, others: Tensor | None) -> Grads:
        return (*_column_backward(ctx, grad, others), None, None)


def overlaps(dx: Tensor, w: Tensor) -> bool:
    """Whether the reduction of dx runs beside the weight gradient, rather than before it.

    On a CPU a small product is done before the thread that communicates has woken up, and waking it costs more.
    """
    return dx.device.type != "cpu" or dx.numel() * w.shape[0] >= WORTH_OVERLAPPING


def _column_backward(ctx: Any, grad: Tensor | None, others: Tensor | None) -> Grads:
    first_order_only()
    x, w = ctx.saved_tensors
    pending = None
    dx = others
    if ctx.needs_input_grad[0]:
        if grad is not None:
            dx = grad.matmul(w)
            if dx.dtype is not ctx.came_as:
                dx = dx.to(ctx.came_as)
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
    def forward(
        ctx: Any, x: Tensor, weight: DTensor, bias: DTensor | None, where: Where, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        ctx.where, ctx.came_as = where, x.dtype
        ctx.set_materialize_grads(False)
        gathered = gather_blocks(x if dtype is None else x.to(dtype), *where)
        out, w = _start(ctx, gathered, weight, bias, dtype)
        save(ctx, gathered, w)
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
            reduced = scatter_blocks(partial, *ctx.where, async_op=overlaps(partial, w))
        dw, db = (None, None) if grad is None else weight_grads(ctx, grad, x)
        dx = reduced if reduced is None or isinstance(reduced, Tensor) else reduced.wait()
        if dx is not None and dx.dtype is not ctx.came_as:
            dx = dx.to(ctx.came_as)
        return dx, dw, db, None, None


def _column(x: Tensor, weight: Any, bias: Any, comm: Comm | None, dtype: torch.dtype | None) -> Tensor:
    out: Tensor = _Column.apply(x, weight, bias, comm, dtype)  # type: ignore[no-untyped-call]  # torch
    return out


_column_direct, _lead_direct = direct(_Column), direct(_LeadColumn)


class ColumnLinear(Lowered):
    """Stand-in for the forward of a column-wise Linear; plain replicated inputs take the shortest way."""

    __slots__ = ("key", "plain", "where")

    def resolve(self) -> None:
        self.key = (self.comm, None, None)
        self.where = axis_dim(self.port_in.layout, self.comm)
        self.plain = self.port_in.layout.is_replicate() and self.finished

    @property
    def finished(self) -> bool:
        """Whether the local output of the product is what leaves the module."""
        return self.sharding.local_outputs and self.port_out.layout == self.port_out.desired

    def __call__(self, input: Tensor) -> Tensor:
        if is_compiling():
            return self.finish(self.traced(input))
        if type(input) is not Tensor or not self.plain or autocasting() or transforming():
            return self.finish(self.general(input))
        params = self.params
        weight, bias = params["weight"], params["bias"]
        if not torch.is_grad_enabled():
            return linear(input, weight._local_tensor, None if bias is None else bias._local_tensor)
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
        local: Any = enter({"weight": self.params["weight"], "bias": self.params["bias"]})
        return linear(arrive_whole(self, input), local["weight"], local["bias"])

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

    def gathered(self, input: Tensor, weight: Any, bias: Any, dtype: torch.dtype | None) -> Tensor:
        """One reader, among possibly several, of an activation cut along another dim: gathered once for all."""
        assert self.where is not None, "the input is cut"
        key = (*self.where, dtype)
        grad = input.requires_grad and torch.is_grad_enabled()
        token = find_token(input, key, grad)
        if token is not None:
            return _column(token, weight, bias, None, dtype)
        out: Tensor
        out, token = apply(_GatherColumn, input, weight, bias, self.where, dtype)
        if not (grad and input.is_leaf):
            keep_token(input, key, token)
        return out

    def general(self, input: Tensor) -> Tensor:
        """The local product for DTensor inputs, other layouts and autocast."""
        params = self.params
        weight, bias = params["weight"], params["bias"]
        spec_of(weight, "weight")
        dtype = autocast_dtype(input)
        if not isinstance(input, DTensor):
            if self.port_in.layout.is_replicate():
                return self.replicated(input, weight, bias, dtype)
            if self.where is not None:
                return self.gathered(input, weight, bias, dtype)
        local = arrive_local(input, self.port_in, self.mesh, grad=Partial())
        return _column(local, weight, bias, None, dtype)

    def finish(self, out: Tensor) -> Tensor:
        """The output in the layout and form that leave the module."""
        if self.finished:
            return out
        spec = spec_of(self.params["weight"], "weight")
        return leave_cut(self, out, out.ndim - 1, spec.shape[0], spec.sizes(0))
