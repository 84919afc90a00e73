"""Moving a tensor from any layout to any other: intersections of boxes, and one all-to-all of exact blocks.

``plan`` is pure: the blocks that one rank sends and receives.  ``move`` runs it and is differentiable.  A scatter is a
move from a layout with one shard, a gather a move to one.  A rank without shards passes one empty tensor, so that it
takes part in the collective of backward too.

Rows on ranks 0 and 1 become columns: each rank sends one 2 x 2 block and keeps one.

    rank 0   a b | c d         a b | c d
             e f | g h         e f | g h
             ---------   ->    i j | k l
    rank 1   i j | k l         m n | o p
             m n | o p        rank 0  rank 1
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from shoal_dtensor.internal import Box, intersect, shape_of, slices_of, volume, whole_box
from shoal_mesh import Comm, all_gather_v, all_to_all_blocks
from shoal_mesh.internal import dataclass, pack_blocks, unpack_blocks

from ..spec.metadata import Layout

Block = tuple[int, tuple[slice, ...]]
"""A block of a local shard: position of the shard among this rank's shards, and index of the block in it."""


@dataclass(frozen=True, slots=True)
class Move:
    """What one rank does in a move.

    Attributes:
        sends: For every rank of the group, blocks of the local source shards.
        receives: For every rank of the group, blocks of the local target shards, in the order in which it sends them.
        shapes: Shape of every local target shard; one empty shape on a rank without any.
    """

    sends: tuple[tuple[Block, ...], ...]
    receives: tuple[tuple[Block, ...], ...]
    shapes: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4096)
def plan(source: Layout, target: Layout, ranks: tuple[int, ...], rank: int) -> Move:
    """What global rank ``rank`` sends and receives when a tensor moves from ``source`` to ``target``.

    Args:
        source: Present layout.
        target: Layout of the result.
        ranks: Global ranks of the group.
        rank: One of them.

    Example:
        >>> from shoal_shard_api.ranks.reshard import plan
        >>> rows = ((0, ((0, 1), (0, 2))), (1, ((1, 2), (0, 2))))
        >>> columns = ((0, ((0, 2), (0, 1))), (1, ((0, 2), (1, 2))))
        >>> plan(rows, columns, (0, 1), 0).receives[1]
        ((0, (slice(1, 2, None), slice(0, 1, None))),)
    """
    before = {each: _boxes(source, each) for each in ranks}
    after = {each: _boxes(target, each) for each in ranks}
    return Move(
        tuple(_blocks(before[rank], after[peer], of_source=True) for peer in ranks),
        tuple(_blocks(before[peer], after[rank], of_source=False) for peer in ranks),
        tuple(tuple(shape_of(box)) for box in after[rank]) or ((0,),),
    )


def _boxes(layout: Layout, rank: int) -> list[Box]:
    return [box for holder, box in layout if holder == rank]


def _blocks(sources: list[Box], targets: list[Box], *, of_source: bool) -> tuple[Block, ...]:
    """The common blocks of two ranks' shards, in an order that both know, as blocks of one side's shards."""
    blocks: list[Block] = []
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            common = intersect(source, target)
            if common is not None:
                blocks.append((i, slices_of(common, source)) if of_source else (j, slices_of(common, target)))
    return tuple(blocks)


def move(tensors: Sequence[torch.Tensor], source: Layout, target: Layout, comm: Comm) -> list[torch.Tensor]:
    """Layout -> layout: this rank's shards under ``target``; differentiable, all ranks call it.

    Args:
        tensors: Local source shards in the order of the layout; one empty tensor if there are none.
        source: Present layout.
        target: Layout of the result.
        comm: The communicator over the process group.

    Returns:
        The local target shards in the order of the layout, or one empty tensor.  The given tensors themselves if the
        two layouts are equal.
    """
    if source == target:
        return list(tensors)
    moved: tuple[torch.Tensor, ...] = _Move.apply(source, target, comm, *tensors)  # type: ignore[no-untyped-call]  # torch
    return list(moved)


class _Move(torch.autograd.Function):
    """layout -> layout; the gradient moves back."""

    @staticmethod
    def forward(ctx: Any, source: Layout, target: Layout, comm: Comm, *tensors: torch.Tensor) -> Any:
        ctx.back = (target, source, comm)
        move = plan(source, target, comm.ranks, comm.ranks[comm.rank])
        out = [tensors[0].new_empty(shape) for shape in move.shapes]
        _exchange(move, tensors, comm, out)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, *_Move.apply(*ctx.back, *grads)  # type: ignore[no-untyped-call]  # torch


def _exchange(move: Move, tensors: Sequence[torch.Tensor], comm: Comm, out: Sequence[torch.Tensor]) -> None:
    sends = [[tensors[index][where] for index, where in blocks] for blocks in move.sends]
    all_to_all_blocks(sends, comm, [[out[index][where] for index, where in blocks] for blocks in move.receives])


def collect(tensors: Sequence[torch.Tensor], layout: Layout, shape: torch.Size, comm: Comm) -> torch.Tensor:
    """Layout -> R: the global tensor on every rank; differentiable, all ranks call it.

    The result is replicated, so each rank's gradient of it is taken to be that of all ranks.

    Args:
        tensors: Local shards in the order of the layout; one empty tensor if there are none.
        layout: Their layout.
        shape: Global size.
        comm: The communicator over the process group.
    """
    full: torch.Tensor = _Collect.apply(layout, shape, comm, *tensors)  # type: ignore[no-untyped-call]  # torch
    return full


class _Collect(torch.autograd.Function):
    """layout -> R; the gradient of each rank's own shards is a slice."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, shape: torch.Size, comm: Comm, *tensors: torch.Tensor) -> torch.Tensor:
        boxes = [_boxes(layout, rank) for rank in comm.ranks]
        ctx.own = boxes[comm.rank]
        sizes = [sum(volume(box) for box in own) for own in boxes]
        arrived = all_gather_v(pack_blocks([tensor.detach() for tensor in tensors]), comm, sizes, 0)
        full = tensors[0].new_empty(shape)
        unpack_blocks(arrived, [full[slices_of(box)] for own in boxes for box in own])
        return full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        own = [grad[slices_of(box)].contiguous() for box in ctx.own]
        return None, None, None, *(own or [grad.new_empty(0)])


def scatter(full: torch.Tensor, layout: Layout, src: int, comm: Comm) -> list[torch.Tensor]:
    """Plain on ``src`` -> layout: this rank's shards of the global tensor of ``src``; all ranks call it.

    Args:
        full: The global tensor; on the other ranks only its size and dtype are used.
        layout: Layout of the result.
        src: The sending rank, an index in the group.
        comm: The communicator over the process group.
    """
    source = ((comm.ranks[src], whole_box(full.shape)),)
    tensor = full.contiguous() if comm.rank == src else full.new_empty(0)
    if source == layout:
        return [tensor.clone()]
    with torch.no_grad():
        return move([tensor], source, layout, comm)


def gather(tensors: Sequence[torch.Tensor], layout: Layout, dst: int, comm: Comm, out: torch.Tensor | None) -> None:
    """Layout -> plain on ``dst``: the global tensor is written into ``out``; all ranks call it.

    Args:
        tensors: Local shards in the order of the layout; one empty tensor if there are none.
        layout: Their layout.
        dst: The receiving rank, an index in the group.
        comm: The communicator over the process group.
        out: A tensor of the global size on ``dst``, None elsewhere.
    """
    box = tuple((0, max(each[dim][1] for _, each in layout)) for dim in range(len(layout[0][1])))
    to_one = plan(layout, ((comm.ranks[dst], box),), comm.ranks, comm.ranks[comm.rank])
    like = tensors[0]
    # Blocks arrive in ``out`` itself where they can: no second global tensor on dst.
    direct = out is not None and (out.dtype, out.device) == (like.dtype, like.device)
    full = out if out is not None and direct else like.new_empty(to_one.shapes[0])
    _exchange(to_one, tensors, comm, [full])
    if out is not None and not direct:
        out.copy_(full)
