"""Moving a tensor from any layout to any other: intersections of boxes, and one all-to-all of exact blocks.

``move`` and ``collect`` are differentiable. All ranks of the process group make each call, with
their local shards in the order of the layout; one without shards passes one empty tensor, so that
it takes part in collectives of backward.

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

from shoal_dtensor.internal import (
    Blocks,
    Box,
    exchange_blocks,
    move_blocks,
    shape_of,
    slices_of,
    volume,
    whole_box,
)
from shoal_mesh import Comm, all_gather_v
from shoal_mesh.internal import pack_blocks, unpack_blocks

from ..spec.metadata import Layout


def _boxes(layout: Layout, rank: int) -> list[Box]:
    return [box for holder, box in layout if holder == rank]


@lru_cache(maxsize=4096)
def _plan(source: Layout, target: Layout, ranks: tuple[int, ...], me: int) -> Blocks:
    return exchange_blocks(
        me, *([_boxes(layout, rank) for rank in ranks] for layout in (source, target))
    )


def _run(
    source: Layout,
    target: Layout,
    comm: Comm,
    tensors: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
) -> None:
    """Write the shards of the target into ``out``.  A rank without shards has none of the boxes for its tensor."""
    rank = comm.ranks[comm.rank]
    before = list(zip(_boxes(source, rank), tensors, strict=False))
    after = list(zip(_boxes(target, rank), out, strict=False))
    move_blocks([(_plan(source, target, comm.ranks, comm.rank), before, after)], comm)


def move(
    tensors: Sequence[torch.Tensor], source: Layout, target: Layout, comm: Comm
) -> list[torch.Tensor]:
    """Layout -> layout: this rank's shards under ``target``, or one empty tensor; ``tensors`` for an equal layout."""
    if source == target:
        return list(tensors)
    moved: tuple[torch.Tensor, ...] = _Move.apply(source, target, comm, *tensors)  # type: ignore[no-untyped-call]  # torch
    return list(moved)


class _Move(torch.autograd.Function):
    """layout -> layout; the gradient moves back."""

    @staticmethod
    def forward(
        ctx: Any, source: Layout, target: Layout, comm: Comm, *tensors: torch.Tensor
    ) -> Any:
        ctx.back = (target, source, comm)
        shapes = [shape_of(box) for box in _boxes(target, comm.ranks[comm.rank])] or [[0]]
        out = [tensors[0].new_empty(shape) for shape in shapes]
        _run(source, target, comm, tensors, out)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, *_Move.apply(*ctx.back, *grads)  # type: ignore[no-untyped-call]  # torch


def collect(
    tensors: Sequence[torch.Tensor], layout: Layout, shape: torch.Size, comm: Comm
) -> torch.Tensor:
    """Layout -> R: the global tensor on every rank; each rank's gradient of it is taken to be that of all ranks."""
    full: torch.Tensor = _Collect.apply(layout, shape, comm, *tensors)  # type: ignore[no-untyped-call]  # torch
    return full


class _Collect(torch.autograd.Function):
    """layout -> R; the gradient of each rank's own shards is a slice."""

    @staticmethod
    def forward(
        ctx: Any, layout: Layout, shape: torch.Size, comm: Comm, *tensors: torch.Tensor
    ) -> torch.Tensor:
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
    """Plain on ``src`` -> layout: this rank's shards of the global tensor there; ``src`` is an index in the group."""
    source = ((comm.ranks[src], whole_box(full.shape)),)
    tensor = full.contiguous() if comm.rank == src else full.new_empty(0)
    if source == layout:
        return [tensor.clone()]
    with torch.no_grad():
        return move([tensor], source, layout, comm)


def gather(
    tensors: Sequence[torch.Tensor],
    layout: Layout,
    shape: torch.Size,
    dst: int,
    comm: Comm,
    out: torch.Tensor | None,
) -> None:
    """Layout -> plain on ``dst``, an index in the group: the global tensor is written into ``out``, None elsewhere."""
    target = ((comm.ranks[dst], whole_box(shape)),)
    like = tensors[0]
    if out is None:
        _run(layout, target, comm, tensors, [])
        return
    fits = (out.dtype, out.device) == (like.dtype, like.device)
    # if it fits, no second global tensor on dst
    full = out if fits else like.new_empty(shape)
    _run(layout, target, comm, tensors, [full])
    if not fits:
        out.copy_(full)
