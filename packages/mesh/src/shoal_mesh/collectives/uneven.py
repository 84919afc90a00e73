"""Collectives whose blocks have different sizes, empty ones among them.

What they send is exact, or padded to the largest block where that sends less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Literal, overload

import torch
from torch import Tensor

from ..errors import CollectiveError
from ..events import Event, in_observed, observers, run_observed
from ..groups.process_groups import Comm
from . import backend_calls
from .even import all_gather, all_reduce, reduce_scatter
from .operands import Along, check_operand, check_sizes, normal_dim, resolve
from .pending import Pending
from .wire import materialized


@overload
def all_gather_v(
    tensor: Tensor, comm: Along, sizes: Sequence[int], dim: int = ..., *, async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def all_gather_v(
    tensor: Tensor, comm: Along, sizes: Sequence[int], dim: int = ..., *, async_op: Literal[True]
) -> Pending: ...
def all_gather_v(
    tensor: Tensor, comm: Along, sizes: Sequence[int], dim: int = 0, *, async_op: bool = False
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
    comm = comm if type(comm) is Comm else resolve(comm)
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
        check_operand(tensor)
    dim = normal_dim(tensor, dim)
    total = check_sizes(sizes, comm)
    if tensor.shape[dim] != sizes[comm.rank]:
        raise CollectiveError(
            f"rank {comm.rank} gives {tensor.shape[dim]} along dim {dim}, but sizes say {tuple(sizes)}"
        )
    if len(set(sizes)) == 1:
        return all_gather(tensor, comm, dim, async_op=async_op)  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if observers and not in_observed():
        rest = tuple(n for d, n in enumerate(tensor.shape) if d != dim)
        event = Event(
            "all_gather_into_tensor", comm, (tensor,), same={"sizes": tuple(sizes), "dim": dim, "other lengths": rest}
        )
        return run_observed(event, lambda: all_gather_v(tensor, comm, sizes, dim, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    largest = max(sizes)
    if largest * comm.size > 2 * total:  # padding would more than double what is sent
        return _all_gather_exact(tensor, comm, sizes, dim, async_op)
    pad = list(tensor.shape)
    pad[dim] = largest - sizes[comm.rank]
    source = torch.cat([tensor, tensor.new_empty(pad)], dim) if pad[dim] else tensor

    def joined(gathered: Tensor) -> Tensor:
        blocks = gathered.chunk(comm.size)
        rows = torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])
        return rows.movedim(0, dim).contiguous()

    started = all_gather(source.movedim(dim, 0), comm, async_op=async_op)  # type: ignore[call-overload]  # bool for a literal
    return _then(started, joined)


def _then(started: Tensor | Pending, function: Callable[[Tensor], Tensor]) -> Tensor | Pending:
    """The function of a result, or of a collective under way."""
    return started.then(function) if isinstance(started, Pending) else function(started)


def _all_gather_exact(tensor: Tensor, comm: Comm, sizes: Sequence[int], dim: int, async_op: bool) -> Tensor | Pending:
    """`all_gather_v` without padding: an all-to-all in which every rank sends its shard to each other rank."""
    rest = prod(n for d, n in enumerate(tensor.shape) if d != dim)
    flat = tensor.movedim(dim, 0).reshape(-1)
    counts = [size * rest for size in sizes]
    shape = (sum(sizes), *tensor.shape[:dim], *tensor.shape[dim + 1 :])
    sends = [flat.numel()] * comm.size
    started = all_to_all_v(flat.repeat(comm.size), comm, sends, counts, async_op=async_op)  # type: ignore[call-overload]  # bool for a literal
    return _then(started, lambda out: out.view(shape).movedim(0, dim).contiguous())


@overload
def reduce_scatter_v(
    tensor: Tensor,
    comm: Along,
    sizes: Sequence[int],
    dim: int = ...,
    op: str = ...,
    *,
    async_op: Literal[False] = ...,
) -> Tensor: ...
@overload
def reduce_scatter_v(
    tensor: Tensor, comm: Along, sizes: Sequence[int], dim: int = ..., op: str = ..., *, async_op: Literal[True]
) -> Pending: ...
def reduce_scatter_v(
    tensor: Tensor, comm: Along, sizes: Sequence[int], dim: int = 0, op: str = "sum", *, async_op: bool = False
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
    comm = comm if type(comm) is Comm else resolve(comm)
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
        check_operand(tensor)
    dim = normal_dim(tensor, dim)
    total = check_sizes(sizes, comm)
    if tensor.shape[dim] != total:
        raise CollectiveError(f"dim {dim} of shape {tuple(tensor.shape)} is not the sum of the blocks {tuple(sizes)}")
    if len(set(sizes)) == 1:
        return reduce_scatter(tensor, comm, dim, op, async_op=async_op)  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if observers and not in_observed():
        event = Event(
            "reduce_scatter_tensor",
            comm,
            (tensor,),
            op,
            same={"shape": tuple(tensor.shape), "dim": dim, "sizes": tuple(sizes)},
        )
        return run_observed(event, lambda: reduce_scatter_v(tensor, comm, sizes, dim, op, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    largest, own = max(sizes), sizes[comm.rank]
    if largest * comm.size > 2 * total:  # padded blocks would send more than an all-reduce
        start = sum(sizes[: comm.rank])
        reduced = all_reduce(tensor, comm, op, async_op=async_op)  # type: ignore[call-overload]  # bool for a literal
        return _then(reduced, lambda full: full.narrow(dim, start, own).contiguous())
    rows = tensor.movedim(dim, 0)
    zeros = rows.new_zeros((largest - min(sizes), *rows.shape[1:]))
    blocks = zip(torch.split(rows, list(sizes)), sizes, strict=True)
    padded = torch.cat([part for block, n in blocks for part in (block, zeros[: largest - n])])
    started = reduce_scatter(padded, comm, 0, op, async_op=async_op)  # type: ignore[call-overload]  # bool for a literal
    return _then(started, lambda slot: slot[:own].movedim(0, dim).contiguous())


@overload
def all_to_all_v(
    flat: Tensor,
    comm: Along,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    *,
    async_op: Literal[False] = ...,
) -> Tensor: ...
@overload
def all_to_all_v(
    flat: Tensor, comm: Along, send_sizes: Sequence[int], recv_sizes: Sequence[int], *, async_op: Literal[True]
) -> Pending: ...
def all_to_all_v(
    flat: Tensor, comm: Along, send_sizes: Sequence[int], recv_sizes: Sequence[int], *, async_op: bool = False
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
    comm = comm if type(comm) is Comm else resolve(comm)
    if type(flat) is not Tensor or flat.requires_grad or flat.is_sparse:
        check_operand(flat, "flat")
    total = check_sizes(send_sizes, comm, "send_sizes")
    check_sizes(recv_sizes, comm, "recv_sizes")
    if send_sizes[comm.rank] != recv_sizes[comm.rank]:
        raise CollectiveError(
            f"rank {comm.rank} sends itself {send_sizes[comm.rank]} elements, but receives {recv_sizes[comm.rank]}"
        )
    if flat.shape != (total,):
        raise CollectiveError(f"all_to_all_v of shape {tuple(flat.shape)} with blocks of {tuple(send_sizes)} elements")
    if observers and not in_observed() and comm.size > 1:
        event = Event("all_to_all_single", comm, (flat,), sends=tuple(send_sizes), receives=tuple(recv_sizes))
        return run_observed(event, lambda: all_to_all_v(flat, comm, send_sizes, recv_sizes, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if comm.size == 1:
        return Pending(flat.clone(), None) if async_op else flat.clone()
    if not async_op:
        return backend_calls.exchange_flat(materialized(flat), comm, send_sizes, recv_sizes)
    receive = list(recv_sizes)
    value, work = backend_calls.all_to_all_v(materialized(flat), comm, list(send_sizes), receive, background=True)
    return Pending(value, work, lambda out: backend_calls.in_index_order_v(out, comm, receive))
