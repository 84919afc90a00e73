"""Differentiable collectives on plain activations of one mesh axis.

The backward of each function is the reverse move.

Between modules a plain tensor has a layout that only its modules determine, and so does its
gradient: the gradient of a replicated tensor is complete and equal on all ranks, the gradient of a
sharded tensor is this rank's shard. The order of dims in memory stays, because random values that
are drawn later fill elements in this order, as on one device.

Readers of the same replicated tensor `x` (q, k and v; gate and up) share one reduction of their
partial gradients. The first reader, the leader, returns its output and a *token*: an alias of `x`
whose gradient edge is the leader's own node. Later readers run on the token, so autograd delivers
their partials to the leader, which adds its own and reduces the sum. The token is an attribute of
the tensor object `x`: its lifetime does not depend on other references (all ranks make the same
decision), it dies with `x`, and no cycle arises, because the leader saves aliases, never `x`
itself. A leaf is never shared, because its gradient edge leads back to it. A write to `x` (its
version or storage changes), another communicator, layout or dtype, or a change of grad mode ends
the sharing. In compiled code the readers are single nodes of the graph (`whole_when_compiled`), and
the tensors on which autograd traces it carry the tokens.
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
    """Return the token that an earlier reader with the same key left, if it is still valid.

    The token may be with or without a gradient.

    `in_tree`: readers add their partials block by block, as readers inside `sums_in_tree` must.
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
    """Return the memory of the elements; None for a traced tensor."""
    return None if is_compiling() else memory_of(tensor)


Sizes = tuple[int, ...] | None  # of the ranks' shards; None: equal ones
ShardedDim = tuple[Comm, int, Sizes]
# of a tensor, a communicator, and where it is sharded: (comm, dim, sizes)
Move = Callable[..., Tensor]


def sharded_dim(layout: Placement, comm: Comm) -> ShardedDim | None:
    """Return communicator, dim and shard sizes of a sharded layout of plain tensors, or None."""
    if not isinstance(layout, Shard) or layout.multiple_of != 1:
        return None
    return comm, layout.dim, layout.sizes


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
    """Apply `_ReversibleMove`.

    Selective activation checkpointing does not see the results, which are written to.
    """
    with nullcontext() if is_compiling() or not selectively_checkpointed() else unwatched():
        out: Tensor = apply(_ReversibleMove, tensor, move, back, where)
        return out


@whole_when_compiled
def reduce(tensor: Tensor, comm: Comm) -> Tensor:
    """Sum over the axis (`P -> R`); the backward does nothing."""
    return _moved(tensor, all_reduce, _unchanged, comm)


@whole_when_compiled
def scatter(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """Return this rank's shard of the sum over the axis (`P -> S(dim)`); backward `gather`."""
    return _moved(tensor, reduce_scatter_dim, gather, comm, dim, sizes)


@whole_when_compiled
def gather(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """Gather the shards of all ranks (`S(dim) -> R`); backward `split`."""
    return _moved(tensor, gather_dim, split, comm, dim, sizes)


@whole_when_compiled
def split(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """Return this rank's shard (`R -> S(dim)`), without communication; backward `gather`."""
    return _moved(tensor, own_shard, gather, comm, dim, sizes)


def copy(tensor: Tensor, comm: Comm) -> Tensor:
    """Return the tensor (`R -> R`) for consumers whose gradients are partial.

    The gradients are all-reduced once for all readers of `tensor`.
    """
    return _copied(tensor, comm) if tensor.requires_grad and torch.is_grad_enabled() else tensor


@whole_when_compiled
def _copied(tensor: Tensor, comm: Comm) -> Tensor:
    return _read_once(tensor, (comm, None, None), lambda x, _: x.detach(), reduce, comm)


@whole_when_compiled
def gather_partial(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """Gather shards (`S(dim) -> R`) for consumers whose gradients are partial.

    The gradients are reduce-scattered once for all readers of `tensor`.
    """
    return _read_once(tensor, (comm, dim, sizes, None), gather_dim, scatter, comm, dim, sizes)


def _read_once(tensor: Tensor, key: Hashable, move: Move, back: Move, *where: Any) -> Tensor:
    """Apply `move`, or return the result of the tensor's first reader with the same key.

    A leaf is not shared (`shared_input`).
    """
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
    """Sum each tensor over the ranks (`P -> R`), in one collective per dtype; None stays None.

    The sum is not in place, because other objects may refer to the tensors.
    """
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
