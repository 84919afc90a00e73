"""Collectives with one source or one target, and permutations; only the bytes that must move are sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..argument_types import require, require_each
from ..errors import CollectiveError, CollectiveTypeError
from ..events import Event, in_observed, observers, run_observed
from ..groups.process_groups import Comm
from . import backend_calls
from .operands import Along, check_operand, check_root, check_sizes, resolve
from .wire import materialized


def broadcast(tensor: Tensor, comm: Along, src: int = 0) -> Tensor:
    """`one rank -> R`: a copy of the tensor of the rank with index `src`.

    Args:
        tensor: shape and dtype are equal on all ranks; its values are read on `src` only.
        comm: a communicator of n ranks, or (mesh, axes).
        src: index along the communicator, 0 to n - 1.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: no rank has the index, or the tensor requires grad.

    Example:
        >>> launch(lambda: broadcast(torch.tensor(dist.get_rank()), comm_over((0, 1)), src=1).item(), 2)
        [1, 1]
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    check_root(src, comm, "src")
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
        check_operand(tensor)
    if observers and not in_observed() and comm.size > 1:
        event = Event("broadcast", comm, (tensor,), same={"shape": tuple(tensor.shape), "src": src})
        return run_observed(event, lambda: broadcast(tensor, comm, src))
    own = tensor.clone(memory_format=torch.contiguous_format)
    if comm.size == 1:
        return own
    value, work = backend_calls.broadcast_(own, comm, src)
    if work is not None:
        work.wait()
    return value


def scatter(tensors: Sequence[Tensor] | None, comm: Along, src: int = 0, *, out: Tensor) -> Tensor:
    """`one rank -> S`: `out`, filled with this rank's tensor of the list that the rank with index `src` holds.

    Args:
        tensors: on `src` (n,) tensors in index order, of any shapes and the dtype of `out`; None elsewhere.
        comm: a communicator of n ranks, or (mesh, axes).
        src: index along the communicator, 0 to n - 1.
        out: where this rank's tensor is written; its shape and dtype are that tensor's.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: on `src` there is not one tensor of the right dtype per rank, or `out` requires grad.

    Example:
        >>> def example() -> list[int]:
        ...     comm = comm_over((0, 1))
        ...     rows = [torch.tensor([1]), torch.tensor([2, 3])] if comm.rank == 0 else None
        ...     return scatter(rows, comm, out=torch.empty(1 + comm.rank, dtype=torch.long)).tolist()
        >>> launch(example, 2)
        [[1], [2, 3]]
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    check_root(src, comm, "src")
    check_operand(out, "out")
    require(
        tensors, Sequence | None, "scatter takes a list of tensors on the source, None elsewhere", CollectiveTypeError
    )
    mine = tuple(tensors or ()) if comm.rank == src else ()
    if comm.rank == src:
        require_each(mine, Tensor, "scatter sends a list of tensors", CollectiveTypeError)
        if len(mine) != comm.size:
            given = "None" if tensors is None else len(mine)
            raise CollectiveError(f"scatter from rank {src} needs {comm.size} tensors there, got {given}")
        if any(t.dtype != out.dtype for t in mine):
            raise CollectiveError(f"scatter into {out.dtype} of tensors of {sorted({str(t.dtype) for t in mine})}")
        if mine[src].shape != out.shape:
            raise CollectiveError(
                f"scatter keeps a tensor of shape {tuple(mine[src].shape)} on rank {src}, out has {tuple(out.shape)}"
            )
    send = [t.numel() for t in mine] or [0] * comm.size
    receive = [out.numel() if i == src else 0 for i in range(comm.size)]
    if observers and not in_observed() and comm.size > 1:
        event = Event(
            "scatter",
            comm,
            mine,
            same={"src": src, "dtype": str(out.dtype)},
            sends=tuple(send),
            receives=tuple(receive),
        )
        return run_observed(event, lambda: scatter(tensors, comm, src, out=out))
    if comm.size == 1:
        return out.copy_(mine[0])
    flat = torch.cat([t.detach().reshape(-1) for t in mine]) if mine else out.new_empty((0,))
    return out.copy_(backend_calls.exchange_flat(flat, comm, send, receive).view(out.shape))


def gather(tensor: Tensor, comm: Along, dst: int = 0) -> list[Tensor] | None:
    """`S -> one rank`: every rank's tensor in index order on the rank with index `dst`, None elsewhere.

    Args:
        tensor: this rank's; shape and dtype are equal on all ranks.
        comm: a communicator of n ranks, or (mesh, axes).
        dst: index along the communicator, 0 to n - 1.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: no rank has the index, or the tensor requires grad.

    Example:
        >>> launch(lambda: gather(torch.tensor([dist.get_rank()]), comm_over((0, 1))), 2)
        [[tensor([0]), tensor([1])], None]
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    check_root(dst, comm, "dst")
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
        check_operand(tensor)
    if observers and not in_observed() and comm.size > 1:
        event = Event("gather", comm, (tensor,), same={"shape": tuple(tensor.shape), "dst": dst})
        return run_observed(event, lambda: gather(tensor, comm, dst))
    if comm.size == 1:
        return [tensor.clone(memory_format=torch.contiguous_format)]
    send = [tensor.numel() if i == dst else 0 for i in range(comm.size)]
    receive = [tensor.numel() if comm.rank == dst else 0] * comm.size
    out = backend_calls.exchange_flat(materialized(tensor).view(-1), comm, send, receive)
    return [block.view(tensor.shape) for block in torch.split(out, receive)] if comm.rank == dst else None


def permute(tensor: Tensor, comm: Along, targets: Sequence[int]) -> Tensor:
    """`S -> S`: the tensor of the rank whose target is this one.

    Args:
        tensor: this rank's; shape and dtype are equal on all ranks.
        comm: a communicator of n ranks, or (mesh, axes).
        targets: (n,) for every index the index it sends to; each occurs once, [1, 2, 3, 0] shifts by one.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: `targets` is no permutation of the indices, or the tensor requires grad.

    Example:
        >>> launch(lambda: permute(torch.tensor(dist.get_rank()), comm_over((0, 1)), [1, 0]).item(), 2)
        [1, 0]
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    check_targets(targets, comm)
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
        check_operand(tensor)
    if observers and not in_observed() and comm.size > 1:
        event = Event(
            "all_to_all_single", comm, (tensor,), same={"shape": tuple(tensor.shape), "targets": tuple(targets)}
        )
        return run_observed(event, lambda: permute(tensor, comm, targets))
    if comm.size == 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    send = [tensor.numel() if i == targets[comm.rank] else 0 for i in range(comm.size)]
    receive = [tensor.numel() if target == comm.rank else 0 for target in targets]
    return backend_calls.exchange_flat(materialized(tensor).view(-1), comm, send, receive).view(tensor.shape)


def check_targets(targets: Sequence[int], comm: Comm) -> None:
    """Refuse what is no permutation of the indices along a communicator."""
    check_sizes(targets, comm, "targets")
    if sorted(targets) != list(range(comm.size)):
        raise CollectiveError(f"targets of permute name each of {comm.size} ranks once, got {tuple(targets)}")
