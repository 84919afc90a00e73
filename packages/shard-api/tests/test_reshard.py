"""Moves of shards: the blocks of a plan in one process, and moves on real ranks.  Covers: ranks/reshard.py."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from shoal_dtensor.internal import Box
from shoal_shard_api.ranks.reshard import Block, plan
from shoal_shard_api.spec.metadata import Layout

SHAPE = (6, 5)
RANKS = (3, 0, 2)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A random tiling of the tensor by splitting boxes again and again, on random ranks; an empty box now and then."""
    boxes: list[Box] = [tuple((0, n) for n in SHAPE)]
    for _ in range(draw(st.integers(0, 5))):
        index = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, 1))
        start, stop = boxes[index][dim]
        at = draw(st.integers(start, stop))
        low, high = list(boxes[index]), list(boxes[index])
        low[dim], high[dim] = (start, at), (at, stop)
        boxes[index : index + 1] = [tuple(low), tuple(high)]
    return tuple((draw(st.sampled_from(RANKS)), box) for box in boxes)


def shards_of(full: torch.Tensor, layout: Layout, rank: int) -> list[torch.Tensor]:
    own = [full[tuple(slice(*edges) for edges in box)].contiguous() for r, box in layout if r == rank]
    return own or [full.new_empty(0)]


def select(tensors: list[torch.Tensor], blocks: tuple[Block, ...]) -> list[torch.Tensor]:
    return [tensors[index][where] for index, where in blocks]


@settings(max_examples=300)
@given(layouts(), layouts())
def test_every_element_arrives_where_the_target_has_it(source: Layout, target: Layout) -> None:
    full = torch.arange(30).reshape(SHAPE)
    moves = {rank: plan(source, target, RANKS, rank) for rank in RANKS}
    for index, rank in enumerate(RANKS):
        out = [torch.full(shape, -1) for shape in moves[rank].shapes]
        for peer, blocks in zip(RANKS, moves[rank].receives, strict=True):
            sent = select(shards_of(full, source, peer), moves[peer].sends[index])
            for place, block in zip(select(out, blocks), sent, strict=True):
                assert (place == -1).all(), "each element arrives once"
                place.copy_(block)
        for got, expected in zip(out, shards_of(full, target, rank), strict=True):
            assert torch.equal(got, expected)
