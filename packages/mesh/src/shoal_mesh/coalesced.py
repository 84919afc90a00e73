"""Many tensors in one collective: as many messages as there are dtypes, not as there are tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .collectives import Along, all_gather, all_reduce_, plain_dim, reduce_scatter, refuse_gradient, resolve
from .errors import CollectiveError
from .groups import Comm
from .observe import Event, inside_told, observed, observers

__all__ = ["all_gather_coalesced", "all_reduce_coalesced", "reduce_scatter_coalesced"]


def _told(
    op: str, tensors: Sequence[Tensor], comm: Comm, run: Callable[[], list[Tensor]], reduce_op: str = ""
) -> list[Tensor]:
    """What `run` gives, told to observers as one collective."""
    for tensor in tensors:
        refuse_gradient(tensor)
    if observers and not inside_told() and comm.size > 1 and tensors:
        return observed(Event(op, comm, tuple(tensors), reduce_op), run)
    return run()


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Positions of the tensors of each dtype, in order of first appearance."""
    found: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(i)
    return list(found.values())


def all_reduce_coalesced(tensors: Sequence[Tensor], comm: Along, op: str = "sum") -> list[Tensor]:
    """`all_reduce` of every tensor of a list, in one collective per dtype.

    Args:
        tensors: equal shapes and dtypes on every rank, in the same order.
        comm: a communicator, or (mesh, axes).
        op: as for `all_reduce`.
    """
    comm = resolve(comm)

    def run() -> list[Tensor]:
        out = list(tensors)
        for group in _by_dtype(tensors):
            flat = all_reduce_(torch.cat([tensors[i].reshape(-1) for i in group]), comm, op)
            for i, part in zip(group, torch.split(flat, [tensors[i].numel() for i in group]), strict=True):
                out[i] = part.view(tensors[i].shape)
        return out

    return _told("all_reduce_coalesced", tensors, comm, run, op)


def all_gather_coalesced(tensors: Sequence[Tensor], comm: Along, dim: int = 0) -> list[Tensor]:
    """`all_gather` of every tensor of a list along `dim`, in one collective per dtype."""
    comm = resolve(comm)

    def run() -> list[Tensor]:
        out = list(tensors)
        for group in _by_dtype(tensors):
            flat = all_gather(torch.cat([tensors[i].reshape(-1) for i in group]), comm).view(comm.size, -1)
            sizes = [tensors[i].numel() for i in group]
            for i, part in zip(group, torch.split(flat, sizes, 1), strict=True):
                blocks = part.reshape(comm.size, *(tensors[i].shape or (1,)))
                out[i] = blocks.flatten(0, 1) if dim == 0 else torch.cat(blocks.unbind(), plain_dim(tensors[i], dim))
        return out

    return _told("all_gather_into_tensor_coalesced", tensors, comm, run)


def reduce_scatter_coalesced(tensors: Sequence[Tensor], comm: Along, dim: int = 0, op: str = "sum") -> list[Tensor]:
    """`reduce_scatter` of every tensor of a list along `dim`, in one collective per dtype."""
    comm = resolve(comm)
    for tensor in tensors:
        if tensor.shape[plain_dim(tensor, dim)] % comm.size:
            raise CollectiveError(f"dim {dim} of shape {tuple(tensor.shape)} does not divide into {comm.size} blocks")

    def run() -> list[Tensor]:
        out = list(tensors)
        for group in _by_dtype(tensors):
            rows = [torch.stack(tensors[i].chunk(comm.size, dim)).view(comm.size, -1) for i in group]
            flat = reduce_scatter(torch.cat(rows, 1), comm, 0, op).view(-1)
            for i, part in zip(group, torch.split(flat, [row.shape[1] for row in rows]), strict=True):
                shape = list(tensors[i].shape)
                shape[dim] //= comm.size
                out[i] = part.view(shape)
        return out

    return _told("reduce_scatter_tensor_coalesced", tensors, comm, run, op)
