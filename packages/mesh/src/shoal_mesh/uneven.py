"""Collectives whose blocks have different sizes. What they send is exact, or padded where that sends less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from . import kernels
from .collectives import Along, Pending, all_gather, all_reduce, plain_dim, reduce_scatter, refuse_gradient, resolve
from .errors import CollectiveError
from .groups import Comm
from .observe import Event, inside_told, observed, observers

__all__ = ["all_gather_v", "all_to_all_v", "exchange", "reduce_scatter_v"]


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
    """The ranks' tensors of different sizes, joined along `dim` in index order.

    Args:
        tensor: this rank's; its size along `dim` is `sizes[comm.rank]`, all other sizes are equal on every rank.
        comm: a communicator, or (mesh, axes).
        sizes: size along `dim` of every rank's tensor, 0 allowed; equal on every rank.
        dim: the dim to join.
        async_op: return a `Pending` at once.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    dim = plain_dim(tensor, dim)
    _check_sizes(sizes, comm)
    if tensor.shape[dim] != sizes[comm.rank]:
        raise CollectiveError(
            f"rank {comm.rank} gives {tensor.shape[dim]} along dim {dim}, but sizes say {tuple(sizes)}"
        )
    if len(set(sizes)) == 1:
        return all_gather(tensor, comm, dim, async_op=async_op)  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if observers and not inside_told():
        event = Event("all_gather_into_tensor", comm, (tensor,))
        return observed(event, lambda: all_gather_v(tensor, comm, sizes, dim, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if tensor.requires_grad:
        refuse_gradient(tensor)
    largest, total = max(sizes), sum(sizes)
    if largest * comm.size > 2 * total:  # padding would more than double what is sent
        return _arrived(_exchange_uneven(tensor, comm, sizes, dim), async_op)
    pad = list(tensor.shape)
    pad[dim] = largest - sizes[comm.rank]
    source = torch.cat([tensor, tensor.new_empty(pad)], dim) if pad[dim] else tensor

    def joined(gathered: Tensor) -> Tensor:
        blocks = gathered.chunk(comm.size)
        rows = torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])
        return rows.movedim(0, dim).contiguous()

    return _arrived(all_gather(source.movedim(dim, 0), comm, async_op=True).then(joined), async_op)


def _arrived(pending: Pending, async_op: bool) -> Tensor | Pending:
    """The collective under way, or its result."""
    return pending if async_op else pending.wait()


def _exchange_uneven(tensor: Tensor, comm: Comm, sizes: Sequence[int], dim: int) -> Pending:
    """`all_gather_v` with exact blocks: every rank sends its own tensor to each."""
    rest = tensor.numel() // tensor.shape[dim] if tensor.shape[dim] else _numel_without(tensor, dim)
    flat = tensor.movedim(dim, 0).reshape(-1)
    counts = [size * rest for size in sizes]
    shape = (sum(sizes), *tensor.shape[:dim], *tensor.shape[dim + 1 :])
    pending = all_to_all_v(flat.repeat(comm.size), comm, [flat.numel()] * comm.size, counts, async_op=True)
    return pending.then(lambda out: out.view(shape).movedim(0, dim).contiguous())


def _numel_without(tensor: Tensor, dim: int) -> int:
    count = 1
    for i, size in enumerate(tensor.shape):
        count *= size if i != dim else 1
    return count


def _check_sizes(sizes: Sequence[int], comm: Comm) -> None:
    if len(sizes) != comm.size or min(sizes) < 0:
        raise CollectiveError(f"sizes are one non-negative count for each of {comm.size} ranks, got {tuple(sizes)}")


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
    """This rank's block of the reduction of the ranks' tensors, with block `i` of size `sizes[i]` along `dim`.

    Args:
        tensor: equal shape and dtype on every rank; `sum(sizes)` along `dim`.
        comm: a communicator, or (mesh, axes).
        sizes: block sizes in index order, 0 allowed.
        dim: the dim to cut.
        op: as for `all_reduce`.
        async_op: return a `Pending` at once.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    dim = plain_dim(tensor, dim)
    _check_sizes(sizes, comm)
    if tensor.shape[dim] != sum(sizes):
        raise CollectiveError(f"dim {dim} of shape {tuple(tensor.shape)} is not the sum of the blocks {tuple(sizes)}")
    if len(set(sizes)) == 1:
        return reduce_scatter(tensor, comm, dim, op, async_op=async_op)  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if observers and not inside_told():
        event = Event("reduce_scatter_tensor", comm, (tensor,), op)
        return observed(event, lambda: reduce_scatter_v(tensor, comm, sizes, dim, op, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if tensor.requires_grad:
        refuse_gradient(tensor)
    largest, own = max(sizes), sizes[comm.rank]
    if largest * comm.size > 2 * sum(sizes):  # padded blocks would send more than an all-reduce
        start = sum(sizes[: comm.rank])
        whole = all_reduce(tensor, comm, op, async_op=True)
        return _arrived(whole.then(lambda got: got.narrow(dim, start, own).contiguous()), async_op)
    rows = tensor.movedim(dim, 0)
    padded = rows.new_zeros((comm.size, largest, *rows.shape[1:]))
    for slot, block in zip(padded, torch.split(rows, list(sizes)), strict=True):
        slot[: block.shape[0]] = block
    pending = reduce_scatter(padded.flatten(0, 1), comm, 0, op, async_op=True)
    return _arrived(pending.then(lambda got: got[:own].movedim(0, dim).contiguous()), async_op)


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
    """1-D blocks of exact element counts: block j goes to rank j, block i of the result comes from rank i.

    Args:
        flat: (sum(send_sizes),).
        comm: a communicator, or (mesh, axes).
        send_sizes: elements for each rank, 0 allowed.
        recv_sizes: elements from each rank; what that rank's `send_sizes` says for this one.
        async_op: return a `Pending` at once.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if min(send_sizes) < 0 or min(recv_sizes) < 0 or not len(send_sizes) == len(recv_sizes) == comm.size:
        _check_sizes(send_sizes, comm)
        _check_sizes(recv_sizes, comm)
    if flat.shape != (sum(send_sizes),):
        raise CollectiveError(f"all_to_all_v of shape {tuple(flat.shape)} with blocks of {tuple(send_sizes)} elements")
    if observers and not inside_told() and comm.size > 1:
        event = Event("all_to_all_single", comm, (flat,))
        return observed(event, lambda: all_to_all_v(flat, comm, send_sizes, recv_sizes, async_op=async_op))  # type: ignore[call-overload,no-any-return]  # bool for a literal
    if flat.requires_grad:
        refuse_gradient(flat)
    if comm.size == 1:
        return _arrived(Pending(flat.clone(), None), async_op)
    if not async_op:
        return exchange(flat.contiguous(), comm, send_sizes, recv_sizes)
    receive = list(recv_sizes)
    value, work = kernels.all_to_all_v(flat.contiguous(), comm, list(send_sizes), receive)
    if comm.order is None:
        return Pending(value, work)
    return Pending(value, work, lambda got: torch.cat(kernels.split_ordered(got, comm, receive)))


def exchange(flat: Tensor, comm: Comm, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """What `all_to_all_v` gives, for a contiguous tensor and checked sizes."""
    send, receive = send if type(send) is list else list(send), receive if type(receive) is list else list(receive)
    value, work = kernels.all_to_all_v(flat, comm, send, receive)
    if work is not None:
        work.wait()
    if comm.order is None:
        return value
    return torch.cat(kernels.split_ordered(value, comm, receive))
