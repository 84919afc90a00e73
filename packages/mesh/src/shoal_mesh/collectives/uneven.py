"""Collectives whose blocks have different sizes, empty ones among them.

What they send is exact, or padded to the largest block where that sends less.
"""

from __future__ import annotations

from math import prod
from typing import Literal, overload

import torch
from torch import Tensor

from ..errors import CollectiveError
from ..groups.process_groups import Comm
from ..transport import Pending, Sizes
from . import calls
from .calls import Along, are_equal, check_sizes, checked, collective, normal_dim
from .even import all_gather, reduce_scatter, reduced, reduced_blocks
from .reductions import WireReduction, materialized, reduction


@overload
def all_gather_v(
    tensor: Tensor, comm: Along, sizes: Sizes, dim: int = ..., *, async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def all_gather_v(tensor: Tensor, comm: Along, sizes: Sizes, dim: int = ..., *, async_op: Literal[True]) -> Pending: ...
def all_gather_v(
    tensor: Tensor, comm: Along, sizes: Sizes, dim: int = 0, *, async_op: bool = False
) -> Tensor | Pending:
    """`S(dim) -> R`: the ranks' shards of different sizes, joined along `dim` in index order.

    Args:
        tensor: this rank's shard, `sizes[comm.rank]` long along `dim`; its other lengths are equal on all ranks.
        comm: a communicator of n ranks, or (mesh, axes).
        sizes: (n,) length along `dim` of every rank's shard, 0 allowed; equal on all ranks.
        dim: the sharded dim.
        async_op: return a `Pending` at once.

    Returns:
        A tensor that is `sum(sizes)` long along `dim`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: no such dim.
        CollectiveError: `sizes` does not fit the ranks or this rank's shard, or the tensor requires grad.

    Example:
        >>> def example() -> list[int]:
        ...     comm = comm_over((0, 1))
        ...     shard = torch.tensor([5]) if comm.rank == 0 else torch.tensor([6, 7])
        ...     return all_gather_v(shard, comm, (1, 2)).tolist()
        >>> launch(example, 2)
        [[5, 6, 7], [5, 6, 7]]
    """
    comm = checked(tensor, comm)
    dim = normal_dim(tensor, dim)
    total = check_sizes(sizes, comm)
    if tensor.shape[dim] != sizes[comm.rank]:
        raise CollectiveError(
            f"rank {comm.rank} gives {tensor.shape[dim]} along dim {dim}, but sizes say {tuple(sizes)}"
        )
    if are_equal(sizes):
        return all_gather(tensor, comm, dim, async_op=async_op)  # type: ignore[call-overload,no-any-return]  # bool for a literal

    def start() -> Pending:
        pending = gathered(tensor.movedim(dim, 0), comm, sizes, async_op)
        return pending.then(lambda rows: rows.movedim(0, dim).contiguous())

    facts = {"shape": (*tensor.shape[:dim], total, *tensor.shape[dim + 1 :]), "dim": dim, "sizes": sizes}
    return collective("all_gather_into_tensor", tensor, comm, start, async_op, "", facts)


def gathered(rows: Tensor, comm: Comm, sizes: Sizes, background: bool) -> Pending:
    """`S(0) -> R`: (sizes[rank], ...) -> (sum(sizes), ...)."""
    largest, rest = max(sizes), rows.shape[1:]
    # (9, 0, 0): padded to 27 rows, exactly 9 to each of the others; (3, 1, 2): padded to 9 rows in one step.
    if largest * comm.size > 2 * sum(sizes):
        flat, arrivals = rows.reshape(-1), [size * prod(rest) for size in sizes]
        send = [flat.numel()] * comm.size
        pending = calls.all_to_all_v(flat.repeat(comm.size), comm, send, arrivals, background)
        return pending.then(lambda out: out.view(sum(sizes), *rest))
    if missing := largest - rows.shape[0]:
        rows = torch.cat([rows, rows.new_empty((missing, *rest))])
    pending = calls.all_gather(rows, comm, background)
    if are_equal(sizes):
        return pending

    def joined(padded: Tensor) -> Tensor:  # (3, 1, 2): of the 9 rows that arrive 3, 1 and 2 are joined
        return torch.cat([block[:size] for block, size in zip(padded.chunk(comm.size), sizes, strict=True)])

    return pending.then(joined)


@overload
def reduce_scatter_v(
    tensor: Tensor, comm: Along, sizes: Sizes, dim: int = ..., op: str = ..., *, async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def reduce_scatter_v(
    tensor: Tensor, comm: Along, sizes: Sizes, dim: int = ..., op: str = ..., *, async_op: Literal[True]
) -> Pending: ...
def reduce_scatter_v(
    tensor: Tensor, comm: Along, sizes: Sizes, dim: int = 0, op: str = "sum", *, async_op: bool = False
) -> Tensor | Pending:
    """`P -> S(dim)`: this rank's block of the reduction of the ranks' tensors, block i `sizes[i]` long along `dim`.

    Args:
        tensor: shape and dtype are equal on all ranks; `sum(sizes)` long along `dim`.
        comm: a communicator of n ranks, or (mesh, axes).
        sizes: (n,) lengths of the blocks in index order, 0 allowed; equal on all ranks.
        dim: the dim to shard.
        op: as for `all_reduce`.
        async_op: return a `Pending` at once.

    Returns:
        A tensor that is `sizes[comm.rank]` long along `dim`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: no such dim.
        CollectiveError: `sizes` does not fit the ranks or the tensor, or the tensor requires grad.

    Example:
        >>> launch(lambda: reduce_scatter_v(torch.arange(3), comm_over((0, 1)), (1, 2)).tolist(), 2)
        [[0], [2, 4]]
    """
    comm = checked(tensor, comm)
    dim = normal_dim(tensor, dim)
    total = check_sizes(sizes, comm)
    if tensor.shape[dim] != total:
        raise CollectiveError(f"dim {dim} of shape {tuple(tensor.shape)} is not the sum of the blocks {tuple(sizes)}")
    if are_equal(sizes):
        return reduce_scatter(tensor, comm, dim, op, async_op=async_op)  # type: ignore[call-overload,no-any-return]  # bool for a literal
    how = reduction(tensor.dtype, op)

    def start() -> Pending:
        pending = reduced_uneven_blocks(tensor.movedim(dim, 0), comm, sizes, how, async_op)
        return pending.then(lambda rows: rows.movedim(0, dim).contiguous())

    facts = {"dim": dim, "sizes": sizes}
    return collective("reduce_scatter_tensor", tensor, comm, start, async_op, op, facts)


def reduced_uneven_blocks(rows: Tensor, comm: Comm, sizes: Sizes, how: WireReduction, background: bool) -> Pending:
    """`P -> S(0)`: (sum(sizes), ...) -> (sizes[rank], ...)."""
    largest, own = max(sizes), sizes[comm.rank]
    if are_equal(sizes):
        return reduced_blocks(rows, comm, how, background)
    if largest * comm.size > 2 * sum(sizes):  # padded blocks would send more than an all-reduce
        first, whole = sum(sizes[: comm.rank]), rows.clone(memory_format=torch.contiguous_format)
        return reduced(whole, comm, how, background).then(lambda total: total.narrow(0, first, own))
    # (3, 1, 2): rows a b c d e f are sent as a b c, d 0 0, e f 0
    zeros = rows.new_zeros((largest - min(sizes), *rows.shape[1:]))
    blocks = zip(torch.split(rows, list(sizes)), sizes, strict=True)
    padded = torch.cat([part for block, n in blocks for part in (block, zeros[: largest - n])])
    return reduced_blocks(padded, comm, how, background).then(lambda block: block[:own])


@overload
def all_to_all_v(
    flat: Tensor, comm: Along, send_sizes: Sizes, recv_sizes: Sizes, *, async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def all_to_all_v(
    flat: Tensor, comm: Along, send_sizes: Sizes, recv_sizes: Sizes, *, async_op: Literal[True]
) -> Pending: ...
def all_to_all_v(
    flat: Tensor, comm: Along, send_sizes: Sizes, recv_sizes: Sizes, *, async_op: bool = False
) -> Tensor | Pending:
    """`S -> S`: 1-D blocks of exact sizes; block j goes to rank j, block i of the result comes from rank i.

    Args:
        flat: (sum(send_sizes),), one dtype on all ranks.
        comm: a communicator of n ranks, or (mesh, axes).
        send_sizes: (n,) elements for each rank, 0 allowed.
        recv_sizes: (n,) elements from each rank: what `send_sizes` of that rank says for this one.
        async_op: return a `Pending` at once.

    Returns:
        A tensor of shape (sum(recv_sizes),).

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: sizes do not fit the ranks or the tensor, or the tensor requires grad.

    Example:
        Rank 0 sends one element to rank 1 and gets two:

        >>> def example() -> list[int]:
        ...     comm = comm_over((0, 1))
        ...     if comm.rank == 0:
        ...         return all_to_all_v(torch.tensor([1]), comm, (0, 1), (0, 2)).tolist()
        ...     return all_to_all_v(torch.tensor([2, 3]), comm, (2, 0), (1, 0)).tolist()
        >>> launch(example, 2)
        [[2, 3], [1]]
    """
    comm = checked(flat, comm, "flat")
    total = check_sizes(send_sizes, comm, "send_sizes")
    check_sizes(recv_sizes, comm, "recv_sizes")
    if send_sizes[comm.rank] != recv_sizes[comm.rank]:
        raise CollectiveError(
            f"rank {comm.rank} sends itself {send_sizes[comm.rank]} elements, but receives {recv_sizes[comm.rank]}"
        )
    if flat.shape != (total,):
        raise CollectiveError(f"all_to_all_v of shape {tuple(flat.shape)} with blocks of {tuple(send_sizes)} elements")

    def start() -> Pending:
        return calls.all_to_all_v(materialized(flat), comm, send_sizes, recv_sizes, async_op)

    return collective("all_to_all_single", flat, comm, start, async_op, flow=(send_sizes, recv_sizes))
