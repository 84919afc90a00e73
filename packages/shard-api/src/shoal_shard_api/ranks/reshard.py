"""Movement of a tensor between layouts: intersect boxes, and send exact blocks in one all-to-all.

``move`` and ``collect`` are differentiable. All ranks of the process group make each call, with
their local shards in the order of the layout. A rank without shards passes one empty tensor, so
that it takes part in the collectives of backward.

Rows on ranks 0 and 1 become columns. Rank 0 keeps the block `a b e f` and sends `c d g h`, and
rank 1 keeps `k l o p` and sends `i j m n`.

    before                      after
                                rank 0 | rank 1
    rank 0:  a b   c d            a b  |  c d
             e f   g h            e f  |  g h
             ---------            i j  |  k l
    rank 1:  i j   k l            m n  |  o p
             m n   o p
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch

from shoal_dtensor.internal import (
    BlockMove,
    Blocks,
    Box,
    exchange_blocks,
    move_blocks,
    move_blocks_compared,
    shape_of,
    slices_of,
    volume,
    whole_box,
)
from shoal_mesh import Comm, all_gather_v
from shoal_mesh.internal import pack_blocks, unpack_blocks

from ..errors import RankMismatchError
from ..spec.metadata import Layout


def _boxes(layout: Layout, rank: int) -> list[Box]:
    """Return the boxes of the shards that a global rank holds.

    Example: with the layout `((0, ((0, 2),)), (1, ((2, 4),)))`, rank 1 holds `[((2, 4),)]`, the
    elements 2 and 3.
    """
    return [box for holder, box in layout if holder == rank]


def _pair_with_boxes(
    layout: Layout, rank: int, tensors: Sequence[torch.Tensor]
) -> list[tuple[Box, torch.Tensor]]:
    """Return the shards of a global rank, each after its box.

    A rank without shards passes one empty tensor, which is left out.
    """
    boxes = _boxes(layout, rank)
    if not boxes:
        return []
    return list(zip(boxes, tensors, strict=True))


@lru_cache(maxsize=4096)
def _plan(source: Layout, target: Layout, ranks: tuple[int, ...], index: int) -> Blocks:
    """Return the blocks that one rank sends and receives.

    Args:
        source: the layout before the exchange.
        target: the layout after it.
        ranks: the global ranks of the group.
        index: the position of the rank in `ranks`. Blocks name other ranks by their positions too.
    """
    before = [_boxes(source, rank) for rank in ranks]
    after = [_boxes(target, rank) for rank in ranks]
    return exchange_blocks(index, before, after)


def _write_shards(
    source: Layout,
    target: Layout,
    comm: Comm,
    tensors: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    facts: str = "",
) -> None:
    """Write this rank's shards of the target into ``out``.

    With ``facts``, ranks compare them and the layouts in the message.

    Raises:
        RankMismatchError: they differ between ranks; on all ranks.
    """
    # Layouts name global ranks. `comm.rank` is the position of this rank in the group.
    global_rank = comm.ranks[comm.rank]
    before = _pair_with_boxes(source, global_rank, tensors)
    after = _pair_with_boxes(target, global_rank, out)
    plan = _plan(source, target, comm.ranks, comm.rank)
    moves = [BlockMove(plan, before, after)]
    if not facts:
        move_blocks(moves, comm)
        return
    statements = [facts, f"from the shards {source}", f"to the shards {target}"]
    difference = move_blocks_compared(moves, comm, statements, like=tensors[0])
    if difference:
        raise RankMismatchError(
            "reshard: all ranks must pass the same spec, and either all or none must have a "
            f"gradient; {difference}"
        )


def move(
    tensors: Sequence[torch.Tensor], source: Layout, target: Layout, comm: Comm, *, facts: str = ""
) -> list[torch.Tensor]:
    """Return this rank's shards under ``target``, or one empty tensor.

    Equal layouts do not communicate: the result is ``tensors``.

    Args:
        tensors: this rank's shards under ``source``, or one empty tensor.
        source: the layout before the move.
        target: the layout after it.
        comm: the ranks.
        facts: text that must be equal on all ranks, like the layouts; "" to compare nothing.

    Raises:
        RankMismatchError: the facts or layouts differ between ranks.
    """
    if source == target:
        return list(tensors)
    moved = _Move.apply(source, target, comm, facts, *tensors)  # type: ignore[no-untyped-call]  # torch
    return list(moved)


class _Move(torch.autograd.Function):
    """Move of shards from one layout to another; the gradient moves back."""

    @staticmethod
    def forward(
        ctx: Any, source: Layout, target: Layout, comm: Comm, facts: str, *tensors: torch.Tensor
    ) -> Any:
        # The layouts have been compared, so backward compares nothing.
        ctx.back = (target, source, comm, "")
        global_rank = comm.ranks[comm.rank]
        shapes = [shape_of(box) for box in _boxes(target, global_rank)]
        if not shapes:
            # A rank without shards has one empty tensor.
            shapes = [[0]]
        out = [tensors[0].new_empty(shape) for shape in shapes]
        _write_shards(source, target, comm, tensors, out=out, facts=facts)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        moved = _Move.apply(*ctx.back, *grads)  # type: ignore[no-untyped-call]  # torch
        return None, None, None, None, *moved


def collect(
    tensors: Sequence[torch.Tensor], layout: Layout, shape: torch.Size, comm: Comm
) -> torch.Tensor:
    """Return the global tensor on every rank.

    In backward, each rank takes the gradient of its own shards from its gradient of the global
    tensor, without communication. The gradient of the global tensor must be equal on all ranks.
    """
    full = _Collect.apply(layout, shape, comm, *tensors)  # type: ignore[no-untyped-call]  # torch
    return cast(torch.Tensor, full)


def _count_elements(boxes: list[Box]) -> int:
    return sum(volume(box) for box in boxes)


class _Collect(torch.autograd.Function):
    """Gathering on all ranks; a shard's gradient is a slice of the global tensor's gradient."""

    @staticmethod
    def forward(
        ctx: Any, layout: Layout, shape: torch.Size, comm: Comm, *tensors: torch.Tensor
    ) -> torch.Tensor:
        boxes_by_rank = [_boxes(layout, rank) for rank in comm.ranks]
        ctx.own_boxes = boxes_by_rank[comm.rank]
        # the number of elements that each rank sends
        sizes = [_count_elements(boxes) for boxes in boxes_by_rank]
        packed = pack_blocks([tensor.detach() for tensor in tensors])
        gathered = all_gather_v(packed, comm, sizes, dim=0)
        full = tensors[0].new_empty(shape)
        places = [full[slices_of(box)] for boxes in boxes_by_rank for box in boxes]
        unpack_blocks(gathered, places)
        return full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grads = [grad[slices_of(box)].contiguous() for box in ctx.own_boxes]
        if not grads:
            grads = [grad.new_empty(0)]
        return None, None, None, *grads


def scatter(full: torch.Tensor, layout: Layout, src: int, comm: Comm) -> list[torch.Tensor]:
    """Return this rank's shards of the global tensor of ``src``.

    ``src`` is a position in the group. ``full`` is read on this rank only; the other ranks pass a
    tensor of the same shape and dtype.
    """
    source = ((comm.ranks[src], whole_box(full.shape)),)
    tensor = full.contiguous() if comm.rank == src else full.new_empty(0)
    if source == layout:
        # `src` keeps the whole tensor; the other ranks have no shards, and return an empty tensor.
        # `move` would return `tensor` itself, which may be `full`.
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
    """Write the global tensor into ``out`` on rank ``dst``.

    ``dst`` is a position in the group. The other ranks pass None for ``out``.
    """
    target = ((comm.ranks[dst], whole_box(shape)),)
    like = tensors[0]
    if out is None:
        # This rank is not `dst`: it sends its shards and receives nothing.
        _write_shards(layout, target, comm, tensors, out=[])
        return
    fits = out.dtype == like.dtype and out.device == like.device
    # Where `out` fits, dst needs no memory for a second global tensor.
    full = out if fits else like.new_empty(shape)
    _write_shards(layout, target, comm, tensors, out=[full])
    if not fits:
        out.copy_(full)
