"""Many tensors in one collective: as many messages as there are dtypes, not as there are tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..argument_types import require_each
from ..errors import CollectiveTypeError
from ..events import Event, in_observed, observers, run_observed
from ..groups.process_groups import Comm
from .even import all_gather, all_reduce_, reduce_scatter
from .operands import Along, check_operand, normal_dim, refuse_uneven, resolve
from .wire import reduction, require_op

Run = Callable[[], list[Tensor]]


def _observed(
    op: str, tensors: Sequence[Tensor], comm: Comm, dim: int | None, run: Run, reduce_op: str = ""
) -> list[Tensor]:
    """What `run` returns, reported to observers as one collective."""
    if observers and not in_observed() and comm.size > 1 and tensors:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        return run_observed(Event(op, comm, tuple(tensors), reduce_op, same={"shapes": shapes, "dim": dim}), run)
    return run()


def _check(tensors: Sequence[Tensor]) -> None:
    require_each(tensors, Tensor, "a coalesced collective takes a list of tensors", CollectiveTypeError)
    for tensor in tensors:
        check_operand(tensor)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Positions of the tensors of each dtype, in order of first appearance."""
    positions: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        positions.setdefault(tensor.dtype, []).append(i)
    return list(positions.values())


def all_reduce_coalesced(tensors: Sequence[Tensor], comm: Along, op: str = "sum") -> list[Tensor]:
    """`P -> R`: `all_reduce` of every tensor of a list, in one collective per dtype.

    Args:
        tensors: any shapes and dtypes, in the same order on all ranks.
        comm: a communicator, or (mesh, axes).
        op: as for `all_reduce`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: as for `all_reduce`.

    Example:
        >>> launch(lambda: all_reduce_coalesced([torch.ones(2), torch.ones(())], comm_over((0, 1))), 2)[0]
        [tensor([2., 2.]), tensor(2.)]
    """
    comm = resolve(comm)
    _check(tensors)
    for tensor in tensors:
        reduction(tensor.dtype, op if type(op) is str else require_op(op))

    def run() -> list[Tensor]:
        out = list(tensors)
        for group in _by_dtype(tensors):
            flat = all_reduce_(torch.cat([tensors[i].reshape(-1) for i in group]), comm, op)
            for i, segment in zip(group, torch.split(flat, [tensors[i].numel() for i in group]), strict=True):
                out[i] = segment.view(tensors[i].shape)
        return out

    return _observed("all_reduce_coalesced", tensors, comm, None, run, op)


def all_gather_coalesced(tensors: Sequence[Tensor], comm: Along, dim: int = 0) -> list[Tensor]:
    """`S(dim) -> R`: `all_gather` of every tensor of a list along `dim`, in one collective per dtype.

    Args:
        tensors: any shapes and dtypes, in the same order on all ranks.
        comm: a communicator, or (mesh, axes).
        dim: the sharded dim of every tensor.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: a tensor has no such dim.
        CollectiveError: a tensor requires grad.

    Example:
        >>> launch(lambda: all_gather_coalesced([torch.ones(2), torch.ones(1, 2)], comm_over((0, 1)))[1].shape, 2)
        [torch.Size([2, 2]), torch.Size([2, 2])]
    """
    comm = resolve(comm)
    _check(tensors)
    for tensor in tensors:
        normal_dim(tensor if tensor.ndim else tensor.view(1), dim)

    def run() -> list[Tensor]:
        out = list(tensors)
        for group in _by_dtype(tensors):
            flat = all_gather(torch.cat([tensors[i].reshape(-1) for i in group]), comm).view(comm.size, -1)
            sizes = [tensors[i].numel() for i in group]
            for i, segment in zip(group, torch.split(flat, sizes, 1), strict=True):
                blocks = segment.reshape(comm.size, *(tensors[i].shape or (1,)))
                out[i] = blocks.flatten(0, 1) if dim == 0 else torch.cat(blocks.unbind(), dim)
        return out

    return _observed("all_gather_into_tensor_coalesced", tensors, comm, dim, run)


def reduce_scatter_coalesced(tensors: Sequence[Tensor], comm: Along, dim: int = 0, op: str = "sum") -> list[Tensor]:
    """`P -> S(dim)`: `reduce_scatter` of every tensor of a list along `dim`, in one collective per dtype.

    Args:
        tensors: any shapes and dtypes, in the same order on all ranks; each is a multiple of n long along `dim`.
        comm: a communicator of n ranks, or (mesh, axes).
        dim: the dim of every tensor to shard.
        op: as for `all_reduce`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: a tensor has no such dim.
        CollectiveError: as for `reduce_scatter`.

    Example:
        >>> launch(lambda: reduce_scatter_coalesced([torch.arange(2), torch.ones(4)], comm_over((0, 1))), 2)[1]
        [tensor([2]), tensor([2., 2.])]
    """
    comm = resolve(comm)
    _check(tensors)
    for tensor in tensors:
        reduction(tensor.dtype, op if type(op) is str else require_op(op))
        if tensor.shape[normal_dim(tensor, dim)] % comm.size:
            refuse_uneven(tensor, dim, comm)

    def run() -> list[Tensor]:
        out = list(tensors)
        for group in _by_dtype(tensors):
            rows = [torch.stack(tensors[i].chunk(comm.size, dim)).view(comm.size, -1) for i in group]
            flat = reduce_scatter(torch.cat(rows, 1), comm, 0, op).view(-1)
            for i, segment in zip(group, torch.split(flat, [row.shape[1] for row in rows]), strict=True):
                shape = list(tensors[i].shape)
                shape[dim] //= comm.size
                out[i] = segment.view(shape)
        return out

    return _observed("reduce_scatter_tensor_coalesced", tensors, comm, dim, run, op)
