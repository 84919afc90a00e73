"""Collectives whose blocks have different sizes, which may be 0.

With one source or one target, the blocks of all other ranks are empty. Messages have exact sizes,
or are padded to the largest block if that sends less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import overload

import torch
from torch import Tensor

from ..argument_types import require, require_each
from ..errors import CollectiveError, CollectiveTypeError
from ..events import run_observed
from ..groups.process_groups import Comm
from ..transport import Pending, Sizes
from . import calls
from .calls import (
    Along,
    Async,
    Sync,
    are_equal,
    check_operand,
    check_root,
    check_sizes,
    collective,
    comm_of_call,
    materialize,
    normal_dim,
)
from .even import all_gather, reduce_scatter, start_block_reduction
from .reductions import reduction


@overload
def all_gather_v(
    tensor: Tensor, comm: Along, sizes: Sizes, dim: int = ..., *, async_op: Sync = ...
) -> Tensor: ...
@overload
def all_gather_v(
    tensor: Tensor, comm: Along, sizes: Sizes, dim: int = ..., *, async_op: Async
) -> Pending: ...
def all_gather_v(
    tensor: Tensor, comm: Along, sizes: Sizes, dim: int = 0, *, async_op: bool = False
) -> Tensor | Pending:
    """`S(dim) -> R`: join shards of different sizes along `dim` to the length `sum(sizes)`.

    Args:
        tensor: this rank's shard, `sizes[comm.rank]` long along `dim`; its other lengths are equal
            on all ranks.
        comm: a communicator of n ranks, or (mesh, axes).
        sizes: (n,) length along `dim` of every rank's shard, 0 allowed; equal on all ranks.
        dim: the sharded dim.
        async_op: return a `Pending` at once. The tensor must not be written to before its
            `wait()` has returned, as in torch.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: no such dim.
        CollectiveError: `sizes` does not fit the ranks or this rank's shard, or the tensor requires
            grad.

    Example:
        >>> def example() -> list[int]:
        ...     shard = torch.arange(1 + dist.get_rank())
        ...     return all_gather_v(shard, comm_over((0, 1)), (1, 2)).tolist()
        >>> launch(example, 2)
        [[0, 0, 1], [0, 0, 1]]
    """
    comm = comm_of_call(tensor, comm)
    dim = normal_dim(tensor, dim)
    total = check_sizes(sizes, comm)
    own_size = tensor.shape[dim]
    if own_size != sizes[comm.rank]:
        raise CollectiveError(
            f"rank {comm.rank} gives {own_size} along dim {dim}, but sizes say {tuple(sizes)}"
        )
    if are_equal(sizes):
        # the overloads take `async_op` as a literal only
        gather_even: Callable[..., Tensor | Pending] = all_gather
        return gather_even(tensor, comm, dim, async_op=async_op)

    def start() -> Pending:
        pending = calls.all_gather_v(tensor.movedim(dim, 0), comm, sizes, async_op)
        return pending.then(lambda rows: rows.movedim(0, dim).contiguous())

    gathered_shape = list(tensor.shape)
    gathered_shape[dim] = total
    same = {"shape": tuple(gathered_shape), "dim": dim, "sizes": sizes}
    return collective(
        "all_gather_into_tensor", tensor, comm, start, async_op=async_op, reduce_op="", same=same
    )


@overload
def reduce_scatter_v(
    tensor: Tensor,
    comm: Along,
    sizes: Sizes,
    dim: int = ...,
    op: str = ...,
    *,
    async_op: Sync = ...,
) -> Tensor: ...
@overload
def reduce_scatter_v(
    tensor: Tensor, comm: Along, sizes: Sizes, dim: int = ..., op: str = ..., *, async_op: Async
) -> Pending: ...
def reduce_scatter_v(
    tensor: Tensor,
    comm: Along,
    sizes: Sizes,
    dim: int = 0,
    op: str = "sum",
    *,
    async_op: bool = False,
) -> Tensor | Pending:
    """`P -> S(dim)`: reduce the ranks' tensors and return this rank's block.

    Block i is `sizes[i]` long along `dim`.

    Args:
        tensor: shape and dtype are equal on all ranks; `sum(sizes)` long along `dim`.
        comm: a communicator of n ranks, or (mesh, axes).
        sizes: (n,) lengths of the blocks in index order, 0 allowed; equal on all ranks.
        dim: the dim to shard.
        op: as for `all_reduce`.
        async_op: return a `Pending` at once. The tensor must not be written to before its
            `wait()` has returned, as in torch.

    Returns:
        This rank's block of the reduction.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: no such dim.
        CollectiveError: `sizes` does not fit the ranks or the tensor, or the tensor requires grad.

    Example:
        >>> launch(lambda: reduce_scatter_v(torch.arange(3), comm_over((0, 1)), (1, 2)).tolist(), 2)
        [[0], [2, 4]]
    """
    comm = comm_of_call(tensor, comm)
    dim = normal_dim(tensor, dim)
    total = check_sizes(sizes, comm)
    if tensor.shape[dim] != total:
        raise CollectiveError(
            f"dim {dim} of shape {tuple(tensor.shape)} is not the sum of the blocks {tuple(sizes)}"
        )
    if are_equal(sizes):
        # the overloads take `async_op` as a literal only
        reduce_even: Callable[..., Tensor | Pending] = reduce_scatter
        return reduce_even(tensor, comm, dim, op, async_op=async_op)
    recipe = reduction(tensor.dtype, op)

    def start() -> Pending:
        pending = start_block_reduction(tensor.movedim(dim, 0), comm, recipe, async_op, sizes=sizes)
        return pending.then(lambda rows: rows.movedim(0, dim).contiguous())

    same = {"dim": dim, "sizes": sizes}
    return collective(
        "reduce_scatter_tensor", tensor, comm, start, async_op=async_op, reduce_op=op, same=same
    )


@overload
def all_to_all_v(
    flat: Tensor, comm: Along, send_sizes: Sizes, recv_sizes: Sizes, *, async_op: Sync = ...
) -> Tensor: ...
@overload
def all_to_all_v(
    flat: Tensor, comm: Along, send_sizes: Sizes, recv_sizes: Sizes, *, async_op: Async
) -> Pending: ...
def all_to_all_v(
    flat: Tensor, comm: Along, send_sizes: Sizes, recv_sizes: Sizes, *, async_op: bool = False
) -> Tensor | Pending:
    """`S -> S`: exchange 1-D blocks of exact sizes.

    Block j goes to rank j. The blocks that arrive are joined; the block of rank i is block i.

    Args:
        flat: (sum(send_sizes),), one dtype on all ranks.
        comm: a communicator of n ranks, or (mesh, axes).
        send_sizes: (n,) elements for each rank, 0 allowed.
        recv_sizes: (n,) elements from each rank: recv_sizes[i] is equal to the entry for this rank
            in the `send_sizes` of rank i.
        async_op: return a `Pending` at once. The tensor must not be written to before its
            `wait()` has returned, as in torch.

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
    comm = comm_of_call(flat, comm, "flat")
    total = check_sizes(send_sizes, comm, "send_sizes")
    check_sizes(recv_sizes, comm, "recv_sizes")
    sends_itself = send_sizes[comm.rank]
    expects = recv_sizes[comm.rank]
    if sends_itself != expects:
        raise CollectiveError(
            f"rank {comm.rank} sends itself {sends_itself} elements, but receives {expects}"
        )
    if flat.shape != (total,):
        raise CollectiveError(
            f"all_to_all_v of shape {tuple(flat.shape)} with blocks of {tuple(send_sizes)} elements"
        )

    def start() -> Pending:
        message = materialize(flat)
        return calls.all_to_all_v(message, comm, send_sizes, recv_sizes, background=async_op)

    return collective(
        "all_to_all_single", flat, comm, start, async_op=async_op, flow=(send_sizes, recv_sizes)
    )


def scatter(tensors: Sequence[Tensor] | None, comm: Along, src: int = 0, *, out: Tensor) -> Tensor:
    """`one rank -> S`: fill `out` with this rank's tensor of the list on rank `src`; return it.

    `src` is an index along the communicator.

    Args:
        tensors: on `src` (n,) tensors in index order, of any shapes and the dtype of `out`; None
            elsewhere.
        comm: a communicator of n ranks, or (mesh, axes).
        src: index along the communicator, 0 to n - 1.
        out: the tensor to write to; it has the shape and dtype of this rank's tensor in the list.

    Returns:
        `out`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: on `src` there is not one tensor of the right dtype per rank, or `out`
            requires grad.

    Example:
        >>> def example() -> list[int]:
        ...     comm = comm_over((0, 1))
        ...     rows = [torch.tensor([1]), torch.tensor([2, 3])] if comm.rank == 0 else None
        ...     out = torch.empty(1 + comm.rank, dtype=torch.long)
        ...     return scatter(rows, comm, out=out).tolist()
        >>> launch(example, 2)
        [[1], [2, 3]]
    """
    comm = comm_of_call(out, comm, "out")
    check_root(src, comm, "src")
    if calls.loses_gradient([out]):
        received = torch.empty_like(out)
        calls.refuse_gradient(partial(scatter, tensors, comm, src, out=received))
    allowed = "scatter takes a list of tensors on the source, None elsewhere"
    require(tensors, Sequence | None, allowed, CollectiveTypeError)
    sent: tuple[Tensor, ...] = ()
    if comm.rank == src:
        sent = _checked_blocks(tensors, comm, src, out)
    if comm.size == 1:
        return out.copy_(sent[0])
    send = [tensor.numel() for tensor in sent] or [0] * comm.size
    receive = [0] * comm.size
    receive[src] = out.numel()

    def run() -> Tensor:
        flat = out.new_empty((0,))
        if sent:
            flat = torch.cat([tensor.reshape(-1) for tensor in sent])
        block = calls.all_to_all_v(flat, comm, send, receive).wait()
        return out.copy_(block.view(out.shape))

    same = {"src": src, "dtype": str(out.dtype)}
    return run_observed(run, "scatter", comm, sent, same=same, flow=(send, receive))


def _checked_blocks(
    tensors: Sequence[Tensor] | None, comm: Comm, src: int, out: Tensor
) -> tuple[Tensor, ...]:
    """Return the tensors that the source scatters, or raise if they do not fit."""
    listed = tuple(tensors or ())
    require_each(listed, Tensor, "scatter sends a list of tensors", CollectiveTypeError)
    # detached, because this collective has no gradient
    blocks = tuple([tensor.detach() for tensor in listed])
    for block in blocks:
        check_operand(block, "a tensor")
    if len(blocks) != comm.size:
        got = "None" if tensors is None else len(blocks)
        raise CollectiveError(f"scatter from rank {src} needs {comm.size} tensors there, got {got}")
    if any(block.dtype != out.dtype for block in blocks):
        dtypes = sorted({str(block.dtype) for block in blocks})
        raise CollectiveError(f"scatter into {out.dtype} of tensors of {dtypes}")
    kept = blocks[src]
    if kept.shape != out.shape:
        raise CollectiveError(
            f"scatter keeps a tensor of shape {tuple(kept.shape)} on rank {src}, but out has "
            f"shape {tuple(out.shape)}"
        )
    return blocks


def gather(tensor: Tensor, comm: Along, dst: int = 0) -> list[Tensor] | None:
    """`S -> one rank`: return every rank's tensor in index order on rank `dst`, None elsewhere.

    Args:
        tensor: this rank's tensor; shape and dtype are equal on all ranks.
        comm: a communicator of n ranks, or (mesh, axes).
        dst: index along the communicator, 0 to n - 1.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: no rank has the index, or the tensor requires grad.

    Example:
        >>> launch(lambda: gather(torch.tensor([dist.get_rank()]), comm_over((0, 1))), 2)
        [[tensor([0]), tensor([1])], None]
    """
    comm = comm_of_call(tensor, comm)
    check_root(dst, comm, "dst")
    if calls.loses_gradient([tensor]):
        calls.refuse_gradient(partial(gather, tensor, comm, dst))
    if comm.size == 1:
        return [tensor.clone(memory_format=torch.contiguous_format)]
    count = tensor.numel()
    send = [0] * comm.size
    send[dst] = count
    receive = [count if comm.rank == dst else 0] * comm.size

    def run() -> list[Tensor] | None:
        flat = materialize(tensor).view(-1)
        out = calls.all_to_all_v(flat, comm, send, receive).wait()
        if comm.rank != dst:
            return None
        return [block.view(tensor.shape) for block in torch.split(out, receive)]

    same = {"shape": tensor.shape, "dst": dst}
    return run_observed(run, "gather", comm, (tensor,), same=same)


def permute(tensor: Tensor, comm: Along, targets: Sequence[int]) -> Tensor:
    """`S -> S`: return the tensor of the rank whose target is this rank.

    Args:
        tensor: this rank's tensor; shape and dtype are equal on all ranks.
        comm: a communicator of n ranks, or (mesh, axes).
        targets: (n,) index i sends to index targets[i]. Each index occurs once: [1, 2, 3, 0] shifts
            by one.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: `targets` is not a permutation of the indices, or the tensor requires grad.

    Example:
        >>> def example() -> float:
        ...     return permute(torch.tensor(dist.get_rank()), comm_over((0, 1)), [1, 0]).item()
        >>> launch(example, 2)
        [1, 0]
    """
    comm = comm_of_call(tensor, comm)
    check_targets(targets, comm)
    if calls.loses_gradient([tensor]):
        calls.refuse_gradient(partial(permute, tensor, comm, targets))
    count = tensor.numel()
    send = [0] * comm.size
    send[targets[comm.rank]] = count
    receive = [count if target == comm.rank else 0 for target in targets]
    if comm.size == 1:
        return tensor.clone(memory_format=torch.contiguous_format)

    def run() -> Tensor:
        flat = materialize(tensor).view(-1)
        block = calls.all_to_all_v(flat, comm, send, receive).wait()
        return block.view(tensor.shape)

    same = {"shape": tensor.shape, "targets": targets}
    return run_observed(run, "all_to_all_single", comm, (tensor,), same=same)


def check_targets(targets: Sequence[int], comm: Comm) -> None:
    """Raise unless a permutation of the indices along a communicator is given."""
    check_sizes(targets, comm, "targets")
    if sorted(targets) != list(range(comm.size)):
        raise CollectiveError(
            f"targets of permute must name each of {comm.size} ranks once, got {tuple(targets)}"
        )
