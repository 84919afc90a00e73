"""Every element arrives where it is wanted.  Covers: redistribute/blocks.py."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from shoal_dtensor.internal import Box, slices_of, whole_box
from shoal_dtensor.redistribute.blocks import BlockMove, exchange_blocks, move_blocks
from shoal_mesh import comm_over
from shoal_mesh.testing import on_ranks

SHAPE = (6, 5)
MEMBERS = 3
Holdings = list[list[Box]]


@st.composite
def holdings(draw: st.DrawFn, copies: int = 1) -> Holdings:
    """A random tiling of the tensor by splitting boxes again and again, on random members.

    A box is empty now and then.

    Up to ``copies`` members have the same box.
    """
    boxes: list[Box] = [whole_box(SHAPE)]
    for _ in range(draw(st.integers(0, 5))):
        index = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, 1))
        start, stop = boxes[index][dim]
        at = draw(st.integers(start, stop))
        low, high = list(boxes[index]), list(boxes[index])
        low[dim], high[dim] = (start, at), (at, stop)
        boxes[index : index + 1] = [tuple(low), tuple(high)]
    members: Holdings = [[] for _ in range(MEMBERS)]
    for box in dict.fromkeys(boxes):
        for member in draw(st.sets(st.integers(0, MEMBERS - 1), min_size=1, max_size=copies)):
            members[member].append(box)
    return members


@settings(max_examples=300)
@given(holdings(copies=MEMBERS), holdings(copies=MEMBERS))
def test_every_element_is_sent_once_to_each_that_lacks_it(
    before: Holdings, after: Holdings
) -> None:
    moves = [exchange_blocks(me, before, after) for me in range(MEMBERS)]
    for taker, move in enumerate(moves):
        arrived = torch.zeros(SHAPE)
        for box in move.kept:
            assert any(_is_in(box, each) for each in before[taker])
            arrived[slices_of(box)] += 1
        for giver, box in move.receives:
            assert any(_is_in(box, each) for each in before[giver])
            arrived[slices_of(box)] += 1
        wanted = torch.zeros(SHAPE)
        for box in after[taker]:
            wanted[slices_of(box)] += 1
        assert torch.equal(arrived, wanted)
        # both sides list the blocks in one order
        for giver in range(MEMBERS):
            sent = [box for member, box in moves[giver].sends if member == taker]
            assert sent == [box for member, box in move.receives if member == giver]


def _is_in(box: Box, outer: Box) -> bool:
    return all(a <= i and j <= b for (i, j), (a, b) in zip(box, outer, strict=True))


@on_ranks(MEMBERS)
def test_blocks_of_several_tensors_move_at_once() -> None:
    comm = comm_over(range(MEMBERS))
    full = torch.arange(30.0).view(SHAPE)
    # member 0 has two blocks of rows
    rows = [[((0, 1), (0, 5)), ((4, 6), (0, 5))], [], [((1, 4), (0, 5))]]
    columns = [[((0, 6), (0, 2))], [((0, 6), (2, 5))], []]
    rounds = ((full, rows, columns), (-full, columns, rows))
    moves = []
    for values, before, after in rounds:
        held = [(box, values[slices_of(box)]) for box in before[comm.rank]]
        wanted = [(box, torch.zeros(SHAPE)[slices_of(box)]) for box in after[comm.rank]]
        blocks = exchange_blocks(comm.rank, before, after)
        moves.append(BlockMove(blocks, held, wanted))
    move_blocks(moves, comm)
    for (values, _, _), move in zip(rounds, moves, strict=True):
        for box, arrived in move.wanted:
            assert torch.equal(arrived, values[slices_of(box)])
