"""Collectives with gradients: each one's backward is its adjoint, which is another collective.

The gradient is that of the sum of the ranks' losses: `all_reduce` of a tensor that every rank goes on with collects
every rank's gradient. Where all ranks go on with the same replicated computation, that counts it once per rank; use the
pair `all_reduce_replicated` and `sum_gradients` there (Megatron's g and f). Linear collectives only: "sum" and "avg".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from . import collectives as plain
from . import rooted, uneven
from .collectives import Along, resolve
from .errors import CollectiveError
from .groups import Comm

__all__ = [
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_reduce_replicated",
    "all_to_all",
    "all_to_all_v",
    "broadcast",
    "gather",
    "permute",
    "reduce_scatter",
    "reduce_scatter_v",
    "scatter",
    "sum_gradients",
]

Map = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    """A linear map with its adjoint; the gradient is again one, so gradients of any order work."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, run: Map, adjoint: Map) -> Tensor:
        ctx.run, ctx.adjoint = run, adjoint
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _apply(grads[0], ctx.adjoint, ctx.run), None, None


def _apply(tensor: Tensor, run: Map, adjoint: Map) -> Tensor:
    return cast(Tensor, _Linear.apply(tensor, run, adjoint))  # type: ignore[no-untyped-call]  # torch has no types here


def _linear_op(op: str) -> None:
    if op not in {"sum", "avg"}:
        raise CollectiveError(f"reduction {op!r} is not linear, so it has no adjoint: 'sum' and 'avg' do")


def all_reduce(tensor: Tensor, comm: Along, op: str = "sum") -> Tensor:
    """The reduction over the ranks; its gradient is the same reduction of the gradients."""
    _linear_op(op)
    comm = resolve(comm)
    return _apply(tensor, lambda x: plain.all_reduce(x, comm, op), lambda g: plain.all_reduce(g, comm, op))


def all_reduce_replicated(tensor: Tensor, comm: Along) -> Tensor:
    """The sum over the ranks, for ranks that go on with one replicated computation: the gradient passes as it is."""
    comm = resolve(comm)
    return _apply(tensor, lambda x: plain.all_reduce(x, comm), lambda g: g.clone())


def sum_gradients(tensor: Tensor, comm: Along) -> Tensor:
    """The tensor itself; its gradient is the sum of the ranks' gradients."""
    comm = resolve(comm)
    return _apply(tensor, lambda x: x.clone(), lambda g: plain.all_reduce(g, comm))


def all_gather(tensor: Tensor, comm: Along, dim: int = 0) -> Tensor:
    """The ranks' tensors joined along `dim`; its gradient is a reduce-scatter."""
    comm = resolve(comm)
    return _apply(tensor, lambda x: plain.all_gather(x, comm, dim), lambda g: plain.reduce_scatter(g, comm, dim))


def all_gather_v(tensor: Tensor, comm: Along, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """The ranks' tensors of different sizes joined along `dim`; its gradient is a reduce-scatter."""
    comm = resolve(comm)
    return _apply(
        tensor,
        lambda x: uneven.all_gather_v(x, comm, sizes, dim),
        lambda g: uneven.reduce_scatter_v(g, comm, sizes, dim),
    )


def reduce_scatter(tensor: Tensor, comm: Along, dim: int = 0, op: str = "sum") -> Tensor:
    """This rank's block of the reduction; its gradient is an all-gather."""
    _linear_op(op)
    comm = resolve(comm)
    scale = comm.size if op == "avg" else 1
    return _apply(
        tensor,
        lambda x: plain.reduce_scatter(x, comm, dim, op),
        lambda g: plain.all_gather(g if scale == 1 else g / scale, comm, dim),
    )


def reduce_scatter_v(tensor: Tensor, comm: Along, sizes: Sequence[int], dim: int = 0, op: str = "sum") -> Tensor:
    """This rank's block, of its own size, of the reduction; its gradient is an all-gather."""
    _linear_op(op)
    comm = resolve(comm)
    scale = comm.size if op == "avg" else 1
    return _apply(
        tensor,
        lambda x: uneven.reduce_scatter_v(x, comm, sizes, dim, op),
        lambda g: uneven.all_gather_v(g if scale == 1 else g / scale, comm, sizes, dim),
    )


def all_to_all(tensor: Tensor, comm: Along, split_dim: int, concat_dim: int) -> Tensor:
    """Blocks along `split_dim` to the ranks, joined along `concat_dim`; its gradient goes the other way."""
    comm = resolve(comm)
    return _apply(
        tensor,
        lambda x: plain.all_to_all(x, comm, split_dim, concat_dim),
        lambda g: plain.all_to_all(g, comm, concat_dim, split_dim),
    )


def all_to_all_v(flat: Tensor, comm: Along, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
    """1-D blocks of exact element counts; its gradient goes the other way."""
    comm = resolve(comm)
    return _apply(
        flat,
        lambda x: uneven.all_to_all_v(x, comm, send_sizes, recv_sizes),
        lambda g: uneven.all_to_all_v(g, comm, recv_sizes, send_sizes),
    )


def broadcast(tensor: Tensor, comm: Along, src: int = 0) -> Tensor:
    """The tensor of the rank with index `src`; its gradient is the sum of the gradients there, zero elsewhere."""
    comm = resolve(comm)

    def adjoint(grad: Tensor) -> Tensor:
        total = plain.all_reduce(grad, comm)
        return total if comm.rank == src else torch.zeros_like(total)

    return _apply(tensor, lambda x: rooted.broadcast(x, comm, src), adjoint)


def scatter(tensor: Tensor, comm: Along, src: int = 0) -> Tensor:
    """Block `tensor[i]` of the rank with index `src` on rank i; its gradient is gathered there, zero elsewhere.

    Args:
        tensor: (size, ...), of equal shape on every rank; its values are read on `src` only.
        comm: a communicator, or (mesh, axes).
        src: index of the rank that holds the blocks.
    """
    comm = resolve(comm)
    if tensor.shape[0] != comm.size:
        raise CollectiveError(
            f"scatter of shape {tuple(tensor.shape)}: dim 0 has one block for each of {comm.size} ranks"
        )
    return _apply(tensor, lambda x: _scatter(x, comm, src), lambda g: _gather(g, comm, src))


def gather(tensor: Tensor, comm: Along, dst: int = 0) -> Tensor:
    """(size, ...) with every rank's tensor on the rank with index `dst`, zeros elsewhere; its gradient is scattered."""
    comm = resolve(comm)
    return _apply(tensor, lambda x: _gather(x, comm, dst), lambda g: _scatter(g, comm, dst))


def _scatter(blocks: Tensor, comm: Comm, src: int) -> Tensor:
    mine = list(blocks.unbind()) if comm.rank == src else None
    return rooted.scatter(mine, comm, src, out=torch.empty_like(blocks[0], memory_format=torch.contiguous_format))


def _gather(tensor: Tensor, comm: Comm, dst: int) -> Tensor:
    blocks = rooted.gather(tensor, comm, dst)
    return torch.stack(blocks) if blocks is not None else tensor.new_zeros((comm.size, *tensor.shape))


def permute(tensor: Tensor, comm: Along, targets: Sequence[int]) -> Tensor:
    """The tensor of the rank whose target is this one; its gradient goes back."""
    comm = resolve(comm)
    back = sorted(range(len(targets)), key=targets.__getitem__)
    return _apply(tensor, lambda x: rooted.permute(x, comm, targets), lambda g: rooted.permute(g, comm, back))
