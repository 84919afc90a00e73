"""Collectives with one source or one target, and permutations; only the bytes that must move are sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..argument_types import require, require_each
from ..errors import CollectiveError, CollectiveTypeError
from ..events import observed
from ..groups.process_groups import Comm
from . import calls
from .calls import Along, check_root, check_sizes, checked
from .reductions import materialized


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
    comm = checked(tensor, comm)
    check_root(src, comm, "src")
    own = tensor.clone(memory_format=torch.contiguous_format)
    if comm.size == 1:
        return own
    facts = {"shape": tensor.shape, "src": src}
    return observed(lambda: calls.broadcast_(own, comm, src).wait(), "broadcast", comm, (tensor,), same=facts)


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
    comm = checked(out, comm, "out")
    check_root(src, comm, "src")
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
    if comm.size == 1:
        return out.copy_(mine[0])
    send = [t.numel() for t in mine] or [0] * comm.size
    receive = [out.numel() if i == src else 0 for i in range(comm.size)]

    def run() -> Tensor:
        flat = torch.cat([t.detach().reshape(-1) for t in mine]) if mine else out.new_empty((0,))
        return out.copy_(calls.all_to_all_v(flat, comm, send, receive).wait().view(out.shape))

    return observed(run, "scatter", comm, mine, same={"src": src, "dtype": str(out.dtype)}, flow=(send, receive))


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
    comm = checked(tensor, comm)
    check_root(dst, comm, "dst")
    if comm.size == 1:
        return [tensor.clone(memory_format=torch.contiguous_format)]
    send = [tensor.numel() if i == dst else 0 for i in range(comm.size)]
    receive = [tensor.numel() if comm.rank == dst else 0] * comm.size

    def run() -> list[Tensor] | None:
        out = calls.all_to_all_v(materialized(tensor).view(-1), comm, send, receive).wait()
        return [block.view(tensor.shape) for block in torch.split(out, receive)] if comm.rank == dst else None

    return observed(run, "gather", comm, (tensor,), same={"shape": tensor.shape, "dst": dst})


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
    comm = checked(tensor, comm)
    check_targets(targets, comm)
    send = [tensor.numel() if i == targets[comm.rank] else 0 for i in range(comm.size)]
    receive = [tensor.numel() if target == comm.rank else 0 for target in targets]
    if comm.size == 1:
        return tensor.clone(memory_format=torch.contiguous_format)

    def run() -> Tensor:
        return calls.all_to_all_v(materialized(tensor).view(-1), comm, send, receive).wait().view(tensor.shape)

    return observed(run, "all_to_all_single", comm, (tensor,), same={"shape": tensor.shape, "targets": targets})


def check_targets(targets: Sequence[int], comm: Comm) -> None:
    """Refuse what is no permutation of the indices along a communicator."""
    check_sizes(targets, comm, "targets")
    if sorted(targets) != list(range(comm.size)):
        raise CollectiveError(f"targets of permute name each of {comm.size} ranks once, got {tuple(targets)}")
