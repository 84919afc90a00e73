"""Differentiable moves of plain activations between layouts on one mesh axis.

Between modules a plain tensor stands for a layout that only its modules know, and so does its gradient:
the gradient of a replicated tensor is complete and equal on all ranks, that of a sharded one is the
rank's part.  With that convention each move has one partner in the backward:

    reduce    P -> R       backward: nothing              (all-reduce)
    scatter   P -> S(d)    backward: gather               (reduce-scatter)
    gather    S(d) -> R    backward: keep the own part    (all-gather)
    gather_partial         backward: reduce-scatter, for consumers whose gradients are partial
    split     R -> S(d)    backward: gather               (no communication)
    copy      R -> R       backward: all-reduce, for consumers whose gradients are partial
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import Placement, Shard
from shoal_mesh import Comm, all_gather, all_gather_v, all_reduce, all_reduce_, reduce_scatter, reduce_scatter_v

from .._torch import apply, pieces
from ..errors import LayoutError
from .share import find_token, keep_token

__all__ = [
    "Sizes",
    "Where",
    "add_up",
    "axis_dim",
    "copy",
    "gather",
    "gather_blocks",
    "gather_partial",
    "reduce",
    "scatter",
    "scatter_blocks",
    "split",
    "uneven",
]

Sizes = tuple[int, ...] | None
Where = tuple[Comm, int, Sizes]


def axis_dim(layout: Placement, comm: Comm) -> Where | None:
    """Communicator, dim and block sizes of a cut layout of plain tensors; None for other layouts."""
    if not isinstance(layout, Shard) or layout.multiple_of != 1:
        return None
    return comm, layout.dim, layout.sizes


def uneven(kind: str, size: int, dim: int, comm: Comm) -> LayoutError:
    """The error of an output that would be cut unevenly and leave as plain tensors."""
    return LayoutError(
        f"{kind}: dim {dim} of the output has {size} elements, which {comm.size} ranks along {'x'.join(comm.axes)} do "
        "not divide; plain local tensors cannot tell their readers the sizes. Use use_local_output=False, or a layout "
        "with explicit sizes: Shard(dim, sizes=...)"
    )


def gather_blocks(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes, **how: Any) -> Any:
    """All blocks of a dim, concatenated; equal ones where no sizes are given."""
    if sizes is None:
        return all_gather(tensor, comm, dim, **how)
    return all_gather_v(tensor, comm, sizes, dim, **how)


def scatter_blocks(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes, **how: Any) -> Any:
    """The own block of the sum over the ranks; equal blocks where no sizes are given."""
    if sizes is None:
        return reduce_scatter(tensor, comm, dim, **how)
    return reduce_scatter_v(tensor, comm, sizes, dim, **how)


def _own(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes) -> Tensor:
    if sizes is None:
        size = tensor.shape[dim] // comm.size
        return tensor.narrow(dim, comm.rank * size, size).contiguous()
    return tensor.narrow(dim, sum(sizes[: comm.rank]), sizes[comm.rank]).contiguous()


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        return all_reduce(x, comm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, dim: int, sizes: Sizes) -> Tensor:
        ctx.where = comm, dim, sizes
        out: Tensor = scatter_blocks(x, comm, dim, sizes)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return gather(grad, *ctx.where), None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, dim: int, sizes: Sizes, partial: bool) -> Tensor:
        ctx.where, ctx.partial = (comm, dim, sizes), partial
        out: Tensor = gather_blocks(x, comm, dim, sizes)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        back = scatter if ctx.partial else split
        return back(grad, *ctx.where), None, None, None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, dim: int, sizes: Sizes) -> Tensor:
        ctx.where = comm, dim, sizes
        return _own(x, comm, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return gather(grad, *ctx.where), None, None, None


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return reduce(grad, ctx.comm), None


def reduce(tensor: Tensor, comm: Comm) -> Tensor:
    """P -> R: the sum over the axis."""
    out: Tensor = apply(_Reduce, tensor, comm)
    return out


def scatter(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """P -> S(dim): the own block of the sum over the axis."""
    out: Tensor = apply(_Scatter, tensor.contiguous(), comm, dim, sizes)
    return out


def gather(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """S(dim) -> R: the blocks of all ranks."""
    out: Tensor = apply(_Gather, tensor.contiguous(), comm, dim, sizes, False)
    return out


def split(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """R -> S(dim): the own block."""
    out: Tensor = apply(_Split, tensor, comm, dim, sizes)
    return out


def copy(tensor: Tensor, comm: Comm) -> Tensor:
    """R -> R, for consumers whose gradients are partial: all-reduced, once for all readers of `tensor`."""
    if not tensor.requires_grad:
        return tensor
    key = (comm, None, None)
    found = None if tensor.is_leaf else find_token(tensor, key, grad=True)
    if found is not None:
        return found
    token: Tensor = apply(_Copy, tensor, comm)
    if token.requires_grad and not tensor.is_leaf:
        keep_token(tensor, key, token)
    return token


def gather_partial(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """S(dim) -> R, for consumers whose gradients are partial: reduce-scattered, once for all readers of `tensor`."""
    key = (comm, dim, sizes, None)
    grad = tensor.requires_grad and torch.is_grad_enabled()
    found = find_token(tensor, key, grad)
    if found is not None:
        return found
    token: Tensor = apply(_Gather, tensor.contiguous(), comm, dim, sizes, True)
    if not (grad and tensor.is_leaf):
        keep_token(tensor, key, token)
    return token


def add_up(tensors: list[Tensor | None], comm: Comm | None) -> list[Tensor | None]:
    """The sums of some tensors over the axis, in as few collectives as there are dtypes; None stays None.

    The tensors themselves are left alone: in a backward, others may hold them.
    """
    if comm is None or comm.size == 1:
        return tensors
    summed = list(tensors)
    present = [(i, tensor) for i, tensor in enumerate(tensors) if tensor is not None]
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in present):
        same = [(i, tensor) for i, tensor in present if tensor.dtype is dtype]
        if len(same) == 1:
            i, tensor = same[0]
            summed[i] = all_reduce(tensor, comm)
            continue
        flat = all_reduce_(torch.cat([tensor.reshape(-1) for _, tensor in same]), comm)
        parts = pieces(flat, [tensor.numel() for _, tensor in same])
        for (i, tensor), part in zip(same, parts, strict=True):
            summed[i] = part.view_as(tensor)
    return summed
