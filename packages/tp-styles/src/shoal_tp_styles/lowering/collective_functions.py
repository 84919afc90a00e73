"""Differentiable collectives on plain activations of one mesh axis; each function's backward is the reverse move.

Between modules a plain tensor has a layout that only its modules know, and so has its gradient:
that of a replicated tensor is complete and equal on all ranks, that of a sharded one is this rank's
shard. Dims stay in memory as they lie: what is drawn later fills elements in that order, as on one
device.

Readers of the same replicated tensor `x` (q, k and v; gate and up) share one reduction of their
partial gradients. The first one, the leader, gives beside its output a *token*: an alias of `x`
whose gradient edge is the leader's own node. Later readers run on the token, so autograd delivers
their partials to the leader, which adds its own and reduces the sum. The token is an attribute of
the tensor object `x`: its lifetime does not depend on other references (all ranks take the same
decision), it dies with `x`, and no cycle arises, as the leader saves aliases, never `x` itself. A
leaf is never shared, because its gradient edge leads back to it. A write to `x` (its version or
storage changes), another communicator, layout or dtype, or a change of grad mode ends the sharing.
In compiled code the readers are single nodes of the graph (`whole_when_compiled`), and the tensors
on which autograd traces it carry the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import Placement, Shard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    FakeTensor,
    TensorNote,
    apply,
    in_memory_as,
    is_compiling,
    memory_of,
    selectively_checkpointed,
    unwatched,
    whole_when_compiled,
)
from shoal_mesh import Comm, all_gather, all_gather_v, all_reduce, reduce_scatter, reduce_scatter_v
from shoal_mesh.internal import all_reduce_, sums_are_in_tree

_ATTRIBUTE = "_shoal_token"


@dataclass(slots=True, eq=False)
class _Token(TensorNote):
    """The token of a tensor, and the state of the tensor in which it may be used."""

    key: Hashable
    version: int
    memory: object
    token: Tensor


def find_token(
    tensor: Tensor, key: Hashable, grad: bool, *, in_tree: bool = False
) -> Tensor | None:
    """The token, with or without gradient, that an earlier reader with the same key left, if it still holds.

    `in_tree`: readers add their partials up block by block, as those inside `sums_in_tree` have to.
    """
    if sums_are_in_tree() and not in_tree:
        return None
    entry: _Token | None = getattr(tensor, _ATTRIBUTE, None)
    if (
        not entry
        or entry.key != key
        or entry.version != tensor._version
        or entry.memory != _memory(tensor)
    ):
        return None
    return entry.token if entry.token.requires_grad is grad else None


def keep_token(tensor: Tensor, key: Hashable, token: Tensor) -> None:
    """Leave the token of a reading on the tensor."""
    # What merely finds out shapes leaves none; writes to tensors of inference mode are not counted.
    if not isinstance(tensor, FakeTensor) and not tensor.is_inference():
        setattr(tensor, _ATTRIBUTE, _Token(key, tensor._version, _memory(tensor), token))


def _memory(tensor: Tensor) -> object:
    """Where the elements are; those of a tensor that is traced are nowhere, and stay there."""
    return None if is_compiling() else memory_of(tensor)


Sizes = tuple[int, ...] | None  # of the ranks' shards; None: equal ones
ShardedDim = tuple[Comm, int, Sizes]
# of a tensor, a communicator, and where it is sharded: (comm, dim, sizes)
Move = Callable[..., Tensor]


def sharded_dim(layout: Placement, comm: Comm) -> ShardedDim | None:
    """Communicator, dim and shard sizes of a sharded layout of plain tensors; None for other layouts."""
    if not isinstance(layout, Shard) or layout.multiple_of != 1:
        return None
    return comm, layout.dim, layout.sizes


def uneven_output(style: str, size: int, dim: int, comm: Comm) -> LayoutError:
    """The error of an output with shards of different sizes that would leave as plain tensors."""
    return LayoutError(
        f"{style}: dim {dim} of the output has {size} elements, not a multiple of the {comm.size} "
        f"ranks along {'x'.join(comm.axes)}; plain local tensors do not carry shard sizes. Use "
        "use_local_output=False, or a layout with explicit sizes: Shard(dim, sizes=...)"
    )


def gather_dim(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes, **options: Any) -> Any:
    """`S(dim) -> R`: the shards of all ranks, concatenated along `dim`."""
    if sizes is None:
        return all_gather(tensor, comm, dim, **options)
    return all_gather_v(tensor, comm, sizes, dim, **options)


def reduce_scatter_dim(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes, **options: Any) -> Any:
    """`P -> S(dim)`: this rank's shard of the sum over the ranks."""
    if sizes is None:
        return reduce_scatter(tensor, comm, dim, **options)
    return reduce_scatter_v(tensor, comm, sizes, dim, **options)


def own_shard(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes) -> Tensor:
    """This rank's shard of a replicated tensor, contiguous."""
    sizes = sizes or (tensor.shape[dim] // comm.size,) * comm.size
    start = sum(sizes[: comm.rank])  # of sizes (3, 1, 2), rank 2 has 4 and 5
    return tensor.narrow(dim, start, sizes[comm.rank]).contiguous()


def _unchanged(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor


class _ReversibleMove(Function):
    """A move of a tensor; `back`, another move, brings its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move, back: Move, where: tuple[Any, ...]) -> Tensor:
        ctx.back = back
        ctx.where = where
        return in_memory_as(x, move(x, *where))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.back(grad, *ctx.where), None, None, None

    @staticmethod
    def gradient_shares(ctx: Any) -> Sequence[int] | None:
        return None if ctx.back in (split, _unchanged) else ctx.where[0].ranks


def _moved(tensor: Tensor, move: Move, back: Move, *where: Any) -> Tensor:
    """`_ReversibleMove`; selective activation checkpointing does not see the results, which are written to."""
    with nullcontext() if is_compiling() or not selectively_checkpointed() else unwatched():
        out: Tensor = apply(_ReversibleMove, tensor, move, back, where)
        return out


@whole_when_compiled
def reduce(tensor: Tensor, comm: Comm) -> Tensor:
    """`P -> R`, backward nothing: the sum over the axis."""
    return _moved(tensor, all_reduce, _unchanged, comm)


@whole_when_compiled
def scatter(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """`P -> S(dim)`, backward `gather`: this rank's shard of the sum over the axis."""
    return _moved(tensor, reduce_scatter_dim, gather, comm, dim, sizes)


@whole_when_compiled
def gather(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """`S(dim) -> R`, backward `split`: the shards of all ranks."""
    return _moved(tensor, gather_dim, split, comm, dim, sizes)


@whole_when_compiled
def split(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """`R -> S(dim)`, backward `gather`: this rank's shard, without communication."""
    return _moved(tensor, own_shard, gather, comm, dim, sizes)


def copy(tensor: Tensor, comm: Comm) -> Tensor:
    """`R -> R`, for consumers whose gradients are partial: all-reduced, once for all readers of `tensor`."""
    return _copied(tensor, comm) if tensor.requires_grad and torch.is_grad_enabled() else tensor


@whole_when_compiled
def _copied(tensor: Tensor, comm: Comm) -> Tensor:
    return _read_once(tensor, (comm, None, None), lambda x, _: x.detach(), reduce, comm)


@whole_when_compiled
def gather_partial(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """`S(dim) -> R`, for consumers whose gradients are partial: reduce-scattered, once for all readers of `tensor`."""
    return _read_once(tensor, (comm, dim, sizes, None), gather_dim, scatter, comm, dim, sizes)


def _read_once(tensor: Tensor, key: Hashable, move: Move, back: Move, *where: Any) -> Tensor:
    """What the first reader of a tensor made of it, for all that follow; a leaf is not shared (`shared_input`)."""
    grad = tensor.requires_grad and torch.is_grad_enabled()
    alone = tensor.is_leaf and grad
    shared = None if alone else find_token(tensor, key, grad)
    if shared is not None:
        return shared
    token = _moved(tensor, move, back, *where)
    if not alone:
        keep_token(tensor, key, token)
    return token


def sum_over_ranks(tensors: list[Tensor | None], comm: Comm | None) -> list[Tensor | None]:
    """`P -> R` for each tensor (not in place: others may refer to it), in one collective per dtype; None stays None."""
    if comm is None or comm.size == 1:
        return tensors
    summed = list(tensors)
    present = [(i, tensor) for i, tensor in enumerate(tensors) if tensor is not None]
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in present):
        same = [(i, tensor) for i, tensor in present if tensor.dtype is dtype]
        flat = all_reduce_(torch.cat([tensor.reshape(-1) for _, tensor in same]), comm)
        sums = torch.split_with_sizes(flat, [tensor.numel() for _, tensor in same])
        for (i, tensor), total in zip(same, sums, strict=True):
            summed[i] = total.view_as(tensor)
    return summed
