"""Collectives with one source or one target, and permutations. Only the bytes that must move are sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import kernels
from .collectives import Along, refuse_gradient, resolve
from .errors import CollectiveError
from .groups import Comm
from .observe import Event, inside_told, observed, observers
from .uneven import exchange

__all__ = ["broadcast", "gather", "permute", "scatter"]


def broadcast(tensor: Tensor, comm: Along, src: int = 0) -> Tensor:
    """A copy of the tensor of the rank with index `src`; equal shape and dtype on every rank."""
    comm = comm if type(comm) is Comm else resolve(comm)
    _check_index(src, comm)
    if observers and not inside_told() and comm.size > 1:
        return observed(Event("broadcast", comm, (tensor,)), lambda: broadcast(tensor, comm, src))
    if tensor.requires_grad:
        refuse_gradient(tensor)
    own = tensor.clone(memory_format=torch.contiguous_format)
    if comm.size == 1:
        return own
    value, work = kernels.broadcast_(own, comm, src)
    if work is not None:
        work.wait()
    return value


def scatter(tensors: Sequence[Tensor] | None, comm: Along, src: int = 0, *, out: Tensor) -> Tensor:
    """`out`, filled with this rank's tensor of the list that the rank with index `src` holds.

    Args:
        tensors: one per rank in index order, of any shapes; read on `src` only, None elsewhere.
        comm: a communicator, or (mesh, axes).
        src: index of the rank that holds them.
        out: where this rank's goes; its shape and dtype are that tensor's.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    _check_index(src, comm)
    if comm.rank == src and (tensors is None or len(tensors) != comm.size):
        got = "None" if tensors is None else str(len(tensors))
        raise CollectiveError(f"scatter from rank {src} needs {comm.size} tensors there, got {got}")
    mine = tuple(tensors or ()) if comm.rank == src else ()
    if any(t.dtype != out.dtype for t in mine):
        raise CollectiveError(f"scatter into {out.dtype} of tensors of {sorted({str(t.dtype) for t in mine})}")
    if observers and not inside_told() and comm.size > 1:
        return observed(Event("scatter", comm, mine), lambda: scatter(tensors, comm, src, out=out))
    if out.requires_grad:
        refuse_gradient(out)
    if comm.size == 1:
        return out.copy_(mine[0])
    send = [t.numel() for t in mine] or [0] * comm.size
    receive = [out.numel() if i == src else 0 for i in range(comm.size)]
    flat = torch.cat([t.detach().reshape(-1) for t in mine]) if mine else out.new_empty((0,))
    return out.copy_(exchange(flat, comm, send, receive).view(out.shape))


def gather(tensor: Tensor, comm: Along, dst: int = 0) -> list[Tensor] | None:
    """Every rank's tensor in index order on the rank with index `dst`, None elsewhere; equal shapes on every rank."""
    comm = comm if type(comm) is Comm else resolve(comm)
    _check_index(dst, comm)
    if observers and not inside_told() and comm.size > 1:
        return observed(Event("gather", comm, (tensor,)), lambda: gather(tensor, comm, dst))
    if tensor.requires_grad:
        refuse_gradient(tensor)
    if comm.size == 1:
        return [tensor.clone(memory_format=torch.contiguous_format)]
    send = [tensor.numel() if i == dst else 0 for i in range(comm.size)]
    receive = [tensor.numel() if comm.rank == dst else 0] * comm.size
    out = exchange(tensor.reshape(-1), comm, send, receive)
    return [block.view(tensor.shape) for block in torch.split(out, receive)] if comm.rank == dst else None


def permute(tensor: Tensor, comm: Along, targets: Sequence[int]) -> Tensor:
    """The tensor of the rank whose target is this one; equal shapes on every rank.

    Args:
        tensor: this rank's.
        comm: a communicator, or (mesh, axes).
        targets: for every index the index it sends to; each occurs once. `[1, 2, 3, 0]` shifts by one.
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    if sorted(targets) != list(range(comm.size)):
        raise CollectiveError(f"targets of permute name each of {comm.size} ranks once, got {tuple(targets)}")
    if observers and not inside_told() and comm.size > 1:
        return observed(Event("all_to_all_single", comm, (tensor,)), lambda: permute(tensor, comm, targets))
    if tensor.requires_grad:
        refuse_gradient(tensor)
    send = [tensor.numel() if i == targets[comm.rank] else 0 for i in range(comm.size)]
    receive = [tensor.numel() if target == comm.rank else 0 for target in targets]
    if comm.size == 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    return exchange(tensor.reshape(-1), comm, send, receive).view(tensor.shape)


def _check_index(index: int, comm: Comm) -> None:
    if not 0 <= index < comm.size:
        raise CollectiveError(f"rank index {index} along {comm.axes}: it has {comm.size} ranks")
