"""Differentiable collectives on plain activations of one mesh axis.

The backward of each function is the reverse move.

A plain tensor between modules does not know its layout; the modules on both sides do. Its gradient
has the same layout: the gradient of a replicated tensor is complete and equal on all ranks, and the
gradient of a sharded tensor is this rank's shard. The functions keep the order of dims in memory,
because random values that are drawn later fill elements in this order, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import Placement, Shard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    apply,
    is_compiling,
    selectively_checkpointed,
    unwatched,
    whole_when_compiled,
    with_memory_order_of,
)
from shoal_mesh import Comm, all_gather, all_gather_v, all_reduce, reduce_scatter, reduce_scatter_v
from shoal_mesh.internal import all_reduce_, parts_like, positions_by_dtype

# Sizes of the ranks' shards; None: equal ones.
Sizes = tuple[int, ...] | None
# Function of a tensor, a communicator, and for sharded tensors the dim and the sizes.
Move = Callable[..., Tensor]


class ActivationShard(NamedTuple):
    """The place at which an activation is sharded over one mesh axis.

    Attributes:
        comm: the communicator of the axis.
        dim: the sharded dim of the tensor.
        sizes: sizes of the ranks' shards; None: equal ones.
    """

    comm: Comm
    dim: int
    sizes: Sizes


def sharded_dim(layout: Placement, comm: Comm) -> ActivationShard | None:
    """Return communicator, dim and shard sizes of a sharded layout of plain tensors, or None."""
    if not isinstance(layout, Shard) or layout.multiple_of != 1:
        return None
    return ActivationShard(comm, layout.dim, layout.sizes)


def uneven_output(style: str, size: int, dim: int, comm: Comm) -> LayoutError:
    """Return the error for an output with unequal shards that would leave as plain tensors."""
    return LayoutError(
        f"{style}: dim {dim} of the output has {size} elements, not a multiple of the {comm.size} "
        f"ranks along {'x'.join(comm.axes)}; plain local tensors do not carry shard sizes. Use "
        "use_local_output=False, or a layout with explicit sizes: Shard(dim, sizes=...)"
    )


def gather_dim(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes, **options: Any) -> Any:
    """Concatenate the shards of all ranks along `dim` (`S(dim) -> R`)."""
    if sizes is None:
        return all_gather(tensor, comm, dim, **options)
    return all_gather_v(tensor, comm, sizes, dim, **options)


def reduce_scatter_dim(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes, **options: Any) -> Any:
    """Return this rank's shard of the sum over the ranks (`P -> S(dim)`)."""
    if sizes is None:
        return reduce_scatter(tensor, comm, dim, **options)
    return reduce_scatter_v(tensor, comm, sizes, dim, **options)


def own_shard(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes) -> Tensor:
    """Return this rank's shard of a replicated tensor, contiguous."""
    if sizes is None:
        sizes = (tensor.shape[dim] // comm.size,) * comm.size
    # Example: sizes (3, 1, 2) -> rank 2 has the indices 4 and 5.
    start = sum(sizes[: comm.rank])
    return tensor.narrow(dim, start, sizes[comm.rank]).contiguous()


def keep_tensor(tensor: Tensor, comm: Comm) -> Tensor:
    """Return the tensor; as the backward of a move, for gradients that are complete already."""
    return tensor


class ReversibleMove(Function):
    """A move of a tensor; `back`, another move, brings its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move, back: Move, place: tuple[Any, ...]) -> Tensor:
        ctx.back = back
        ctx.place = place
        return with_memory_order_of(x, move(x, *place))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.back(grad, *ctx.place), None, None, None

    @staticmethod
    def gradient_shares(ctx: Any) -> Sequence[int] | None:
        """Return the ranks that contribute a share of the gradient; None for whole gradients."""
        if ctx.back in (split, keep_tensor):
            return None
        comm: Comm = ctx.place[0]
        return comm.ranks


def apply_move(tensor: Tensor, move: Move, back: Move, *place: Any) -> Tensor:
    """Apply a move whose backward is the move `back`.

    Selective activation checkpointing does not see the result, because later code may write to it
    in place.
    """
    is_watched = not is_compiling() and selectively_checkpointed()
    with unwatched() if is_watched else nullcontext():
        out: Tensor = apply(ReversibleMove, tensor, move, back, place)
        return out


@whole_when_compiled
def reduce(tensor: Tensor, comm: Comm) -> Tensor:
    """Sum over the axis (`P -> R`); the backward does nothing."""
    return apply_move(tensor, all_reduce, keep_tensor, comm)


@whole_when_compiled
def scatter(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """Return this rank's shard of the sum over the axis (`P -> S(dim)`); backward `gather`."""
    return apply_move(tensor, reduce_scatter_dim, gather, comm, dim, sizes)


@whole_when_compiled
def gather(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """Gather the shards of all ranks (`S(dim) -> R`); backward `split`."""
    return apply_move(tensor, gather_dim, split, comm, dim, sizes)


@whole_when_compiled
def split(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """Return this rank's shard (`R -> S(dim)`), without communication; backward `gather`."""
    return apply_move(tensor, own_shard, gather, comm, dim, sizes)


def sum_over_ranks(tensors: list[Tensor | None], comm: Comm | None) -> list[Tensor | None]:
    """Sum each tensor over the ranks (`P -> R`), in one collective per dtype; None stays None.

    The sum is not in place, because other objects may refer to the tensors.
    """
    if comm is None or comm.size == 1:
        return tensors
    summed = list(tensors)
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    for positions in positions_by_dtype(dtypes):
        same_dtype = [present for i in positions if (present := tensors[i]) is not None]
        flat = torch.cat([tensor.reshape(-1) for tensor in same_dtype])
        flat = all_reduce_(flat, comm)
        for i, total in zip(positions, parts_like(flat, same_dtype), strict=True):
            summed[i] = total
    return summed
