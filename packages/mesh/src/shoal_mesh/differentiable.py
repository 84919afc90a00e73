"""Collectives with gradients: the backward of each is its adjoint, which is another collective.

The gradient is taken of the sum of the ranks' losses. If every rank continues with a computation of
its own, use `all_reduce`, whose backward sums the ranks' gradients. If all ranks continue with one
replicated computation, this sum would count its gradient once for each rank: use the pair
`all_reduce_replicated` and `sum_gradients` instead (g and f of Megatron). Only linear collectives
are here, so reductions are "sum" and "avg". Arguments, results and errors are those of the
collectives of the same names.

May import: _torch, argument_types, collectives, errors, groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ._torch import is_batch_of_gradients
from .argument_types import require
from .collectives import even, uneven
from .collectives.calls import (
    TRANSFORMED,
    Along,
    check_operand,
    check_root,
    is_dense,
    refuse_transformed,
    resolve,
)
from .collectives.uneven import check_targets
from .errors import CollectiveError, CollectiveTypeError
from .groups.process_groups import Comm

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

Map = tuple[Callable[..., Tensor], *tuple[Any, ...]]
"""A linear collective and its arguments after tensor and communicator: `(even.all_gather, dim)`."""


class _Linear(torch.autograd.Function):
    """A linear map with its adjoint; its gradient is linear, so gradients of any order work."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm, run: Map, adjoint: Map) -> Tensor:
        ctx.comm = comm
        ctx.run = run
        ctx.adjoint = adjoint
        function, *arguments = run
        return function(tensor, comm, *arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        if is_batch_of_gradients(grad):
            raise CollectiveError(TRANSFORMED)
        return _apply(grad, ctx.comm, ctx.adjoint, ctx.run), None, None, None

    @staticmethod
    # `shoal_dtensor.dispatch.plain_tensors` calls it
    def gradient_shares(ctx: Any) -> Sequence[int] | None:
        """Return the global ranks that each pass a share of the gradient.

        Returns None if each rank passes the whole gradient.
        """
        return None if ctx.adjoint == (_copy,) else ctx.comm.ranks


linear_collective = _Linear
"""The autograd function behind all collectives of this module."""


def adjoint_types(run: Map, adjoint: Map) -> tuple[str, str] | None:
    """Return the SPMD types of a collective's argument and result, such as ("P", "S(0)").

    Returns None for a collective without such types. They are those of `shoal_spmd_types`: I and R
    are replicated values, with equal gradients on all ranks (I) or gradients that are partial sums
    (R); P is a partial sum, S(dim) is sharded, V differs by rank.

    Args:
        run: the collective with its arguments.
        adjoint: the collective of the gradient.
    """
    function, *arguments = run
    if "avg" in arguments:
        return None
    if function is _copy:
        return ("I", "R")
    if function is even.all_reduce:
        result = "I" if adjoint == (_copy,) else "R"
        return ("P", result)
    if function is even.all_gather:
        return (f"S({arguments[0]})", "R")
    if function is even.reduce_scatter:
        return ("P", f"S({arguments[0]})")
    if function is even.all_to_all:
        return (f"S({arguments[1]})", f"S({arguments[0]})")
    if function in (uneven.all_to_all_v, uneven.permute):
        return ("V", "V")
    return None


def _apply(tensor: Tensor, comm: Along, run: Map, adjoint: Map) -> Tensor:
    comm = resolve(comm)
    if type(tensor) is not Tensor or not is_dense(tensor):
        # check_operand refuses tensors that require a gradient, for collectives without gradients
        with torch.no_grad():
            check_operand(tensor)
    refuse_transformed((tensor,))
    result = _Linear.apply(tensor, comm, run, adjoint)  # type: ignore[no-untyped-call]  # of torch
    return cast(Tensor, result)


def _check_linear(op: str) -> None:
    """Raise unless a reduction is linear."""
    require(op, str, "a differentiable reduction is 'sum' or 'avg'", CollectiveTypeError)
    if op not in {"sum", "avg"}:
        raise CollectiveError(
            f"reduction {op!r} is not linear, so it is not differentiable: use 'sum' or 'avg'"
        )


def all_reduce(tensor: Tensor, comm: Along, op: str = "sum") -> Tensor:
    """`P -> R`, backward `P -> R`: return the ranks' reduced tensors.

    Example:
        >>> def example() -> list[float]:
        ...     x = torch.ones(2, requires_grad=True)
        ...     differentiable.all_reduce(x, comm_over((0, 1))).sum().backward()
        ...     return x.grad.tolist()
        >>> launch(example, 2)
        [[2.0, 2.0], [2.0, 2.0]]
    """
    _check_linear(op)
    return _apply(tensor, comm, (even.all_reduce, op), (even.all_reduce, op))


def all_reduce_replicated(tensor: Tensor, comm: Along) -> Tensor:
    """`P -> R`, backward `R -> R`: sum tensors for one replicated computation on all ranks.

    Example:
        >>> def example() -> list[float]:
        ...     x = torch.ones(2, requires_grad=True)
        ...     differentiable.all_reduce_replicated(x, comm_over((0, 1))).sum().backward()
        ...     return x.grad.tolist()
        >>> launch(example, 2)
        [[1.0, 1.0], [1.0, 1.0]]
    """
    return _apply(tensor, comm, (even.all_reduce,), (_copy,))


def sum_gradients(tensor: Tensor, comm: Along) -> Tensor:
    """`R -> R`, backward `P -> R`: copy a tensor; its gradient is the sum of the ranks' gradients.

    Example:
        >>> def example() -> list[float]:
        ...     x = torch.ones(2, requires_grad=True)
        ...     differentiable.sum_gradients(x, comm_over((0, 1))).sum().backward()
        ...     return x.grad.tolist()
        >>> launch(example, 2)
        [[2.0, 2.0], [2.0, 2.0]]
    """
    return _apply(tensor, comm, (_copy,), (even.all_reduce,))


def all_gather(tensor: Tensor, comm: Along, dim: int = 0) -> Tensor:
    """`S(dim) -> R`, backward `P -> S(dim)`: join the ranks' shards along `dim`."""
    return _apply(tensor, comm, (even.all_gather, dim), (even.reduce_scatter, dim))


def all_gather_v(tensor: Tensor, comm: Along, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """`S(dim) -> R`, backward `P -> S(dim)`: join shards of different sizes along `dim`."""
    adjoint = (uneven.reduce_scatter_v, sizes, dim)
    return _apply(tensor, comm, (uneven.all_gather_v, sizes, dim), adjoint)


def reduce_scatter(tensor: Tensor, comm: Along, dim: int = 0, op: str = "sum") -> Tensor:
    """`P -> S(dim)`, backward `S(dim) -> R`: return this rank's block of the reduction."""
    _check_linear(op)
    adjoint = (_gather_shares, op, even.all_gather, dim)
    return _apply(tensor, comm, (even.reduce_scatter, dim, op), adjoint)


def reduce_scatter_v(
    tensor: Tensor, comm: Along, sizes: Sequence[int], dim: int = 0, op: str = "sum"
) -> Tensor:
    """`P -> S(dim)`, backward `S(dim) -> R`: return this rank's `sizes[comm.rank]` of the sum."""
    _check_linear(op)
    adjoint = (_gather_shares, op, uneven.all_gather_v, sizes, dim)
    return _apply(tensor, comm, (uneven.reduce_scatter_v, sizes, dim, op), adjoint)


def all_to_all(tensor: Tensor, comm: Along, split_dim: int, concat_dim: int) -> Tensor:
    """`S(concat_dim) -> S(split_dim)`: exchange equal blocks.

    The backward is `S(split_dim) -> S(concat_dim)`.
    """
    run = (even.all_to_all, split_dim, concat_dim)
    adjoint = (even.all_to_all, concat_dim, split_dim)
    return _apply(tensor, comm, run, adjoint)


def all_to_all_v(
    flat: Tensor, comm: Along, send_sizes: Sequence[int], recv_sizes: Sequence[int]
) -> Tensor:
    """`S -> S`, backward `S -> S`: exchange 1-D blocks of exact sizes.

    The gradients go the other way.
    """
    run = (uneven.all_to_all_v, send_sizes, recv_sizes)
    adjoint = (uneven.all_to_all_v, recv_sizes, send_sizes)
    return _apply(flat, comm, run, adjoint)


def broadcast(tensor: Tensor, comm: Along, src: int = 0) -> Tensor:
    """`one rank -> R`, backward `P -> one rank`: return the tensor of rank `src`.

    The gradient is zero on other ranks.
    """
    check_root(src, resolve(comm), "src")
    return _apply(tensor, comm, (even.broadcast, src), (_sum_on, src))


def scatter(tensor: Tensor, comm: Along, src: int = 0) -> Tensor:
    """`one rank -> S(0)`, backward `S(0) -> one rank`: send `tensor[i]` of rank `src` to rank i.

    Args:
        tensor: (n, ...), of equal shape on all ranks; its values are read on `src` only.
        comm: a communicator of n ranks, or (mesh, axes).
        src: index along the communicator, 0 to n - 1.

    Returns:
        A tensor of shape (...). The gradient of `tensor` is zero on ranks other than `src`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: dim 0 has another length than n, or no rank has the index.
    """
    comm = resolve(comm)
    check_root(src, comm, "src")
    require(tensor, Tensor, "a collective takes a torch.Tensor", CollectiveTypeError)
    if tensor.shape[:1] != (comm.size,):
        raise CollectiveError(
            f"scatter of {tuple(tensor.shape)}: dim 0 has one block for each of {comm.size} ranks"
        )
    return _apply(tensor, comm, (_scatter, src), (_gather, src))


def gather(tensor: Tensor, comm: Along, dst: int = 0) -> Tensor:
    """`S(0) -> one rank`, backward `one rank -> S(0)`: gather the ranks' tensors on rank `dst`.

    The result is (n, ...), zeros on other ranks.
    """
    check_root(dst, resolve(comm), "dst")
    return _apply(tensor, comm, (_gather, dst), (_scatter, dst))


def permute(tensor: Tensor, comm: Along, targets: Sequence[int]) -> Tensor:
    """`S -> S`, backward `S -> S`: return the tensor of the rank whose target is this rank.

    The gradient goes back to the source.
    """
    check_targets(targets, resolve(comm))
    # the inverse: targets (1, 2, 0) give (2, 0, 1)
    sources = sorted(range(len(targets)), key=targets.__getitem__)
    return _apply(tensor, comm, (uneven.permute, targets), (uneven.permute, sources))


def _copy(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor.clone()


def _gather_shares(
    grad: Tensor, comm: Comm, op: str, gather: Callable[..., Tensor], *arguments: object
) -> Tensor:
    """Gather the gradient of a reduction; for an average, divide it by the number of ranks."""
    share = grad / comm.size if op == "avg" else grad
    return gather(share, comm, *arguments)


def _sum_on(grad: Tensor, comm: Comm, src: int) -> Tensor:
    total = even.all_reduce(grad, comm)
    return total if comm.rank == src else torch.zeros_like(total)


def _scatter(blocks: Tensor, comm: Comm, src: int) -> Tensor:
    sent = list(blocks.unbind()) if comm.rank == src else None
    out = torch.empty_like(blocks[0], memory_format=torch.contiguous_format)
    return uneven.scatter(sent, comm, src, out=out)


def _gather(tensor: Tensor, comm: Comm, dst: int) -> Tensor:
    blocks = uneven.gather(tensor, comm, dst)
    if blocks is None:
        return tensor.new_zeros((comm.size, *tensor.shape))
    return torch.stack(blocks)
