"""What a move sends and receives, simulated in one process for random layouts.  Covers: reshard.py (the plan)."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_shard_api.boxes import Box
from shoal_shard_api.metadata import Layout
from shoal_shard_api.reshard import Exchange, plan

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


def parts_of(full: torch.Tensor, layout: Layout, rank: int) -> list[torch.Tensor]:
    own = [full[tuple(slice(*edges) for edges in box)].contiguous() for r, box in layout if r == rank]
    return own or [full.new_empty(0)]


def packed(exchange: Exchange, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    blocks = [parts[index][where].reshape(-1) for index, where in exchange.sends]
    flat = torch.cat([*blocks, torch.empty(0, dtype=torch.int64)])
    if exchange.send_as_is:
        assert torch.equal(flat, parts[0].reshape(-1))
    return list(torch.split(flat, list(exchange.send_sizes)))


@settings(max_examples=300)
@given(layouts(), layouts())
def test_every_element_arrives_where_the_target_has_it(source: Layout, target: Layout) -> None:
    full = torch.arange(30).reshape(SHAPE)
    plans = {rank: plan(source, target, RANKS, rank) for rank in RANKS}
    sent = {rank: packed(plans[rank], parts_of(full, source, rank)) for rank in RANKS}
    for index, rank in enumerate(RANKS):
        exchange = plans[rank]
        arrived = torch.cat([sent[peer][index] for peer in RANKS])
        assert [len(sent[peer][index]) for peer in RANKS] == list(exchange.recv_sizes)
        out = [torch.full(shape, -1) for shape in exchange.shapes]
        at = 0
        for j, where in exchange.receives:
            block = out[j][where]
            block.copy_(arrived[at : at + block.numel()].view(block.shape))
            at += block.numel()
        if exchange.recv_dim is not None:
            shapes = [[s.stop - s.start for s in where] for _, where in exchange.receives]
            blocks = torch.split(arrived, [prod(shape) for shape in shapes])
            stacked = [b.view(shape) for b, shape in zip(blocks, shapes, strict=True)]
            assert torch.equal(torch.cat(stacked, exchange.recv_dim), out[0])
            assert exchange.recv_dim or torch.equal(arrived.view(exchange.shapes[0]), out[0])
        for got, wanted in zip(out, parts_of(full, target, rank), strict=True):
            assert torch.equal(got, wanted)


def test_rows_to_columns_arrive_in_place_and_columns_to_rows_leave_in_place() -> None:
    rows: Layout = tuple((rank, ((2 * i, 2 * i + 2), (0, 5))) for i, rank in enumerate(RANKS))
    columns: Layout = tuple((rank, ((0, 6), (2 * i, min(2 * i + 2, 5)))) for i, rank in enumerate(RANKS))
    there, back = plan(rows, columns, RANKS, 0), plan(columns, rows, RANKS, 0)
    assert (there.send_as_is, there.recv_dim) == (False, 0)
    assert (back.send_as_is, back.recv_dim) == (True, 1)
