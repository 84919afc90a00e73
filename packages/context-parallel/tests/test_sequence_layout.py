"""Covers: sequence_layout.py, tiles.py."""

from __future__ import annotations

import pytest
import torch

from shoal_context_parallel import LayoutError, SequenceLayout
from shoal_context_parallel.attention.tiles import tiles
from shoal_context_parallel.sequence_layout import AttentionMask
from shoal_dtensor import Shard
from shoal_dtensor.layout.dim_sharding import shard_sizes


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 5, 8, 24, 31])
def test_every_position_is_held_once_and_comes_back(length: int, ranks: int) -> None:
    full = torch.arange(2 * length).view(2, length)
    documents = [length // 3, length - length // 3]
    for layout in (
        SequenceLayout.contiguous(length, ranks),
        SequenceLayout.head_tail(length, ranks),
        SequenceLayout.per_document(documents, ranks),
    ):
        shards = [layout.shard(full, 1, rank) for rank in range(ranks)]
        assert layout.sizes == tuple(shard.shape[1] for shard in shards)
        assert layout.length == length
        assert all(
            torch.equal(full[0][layout.positions(rank)], shards[rank][0]) for rank in range(ranks)
        )
        assert torch.equal(layout.in_order(shards, 1), full)
    contiguous = SequenceLayout.contiguous(length, ranks)
    assert list(contiguous.sizes) == shard_sizes(length, Shard(0), ranks)


def test_head_and_tail_have_equal_causal_work() -> None:
    for length in (16, 64):
        layout = SequenceLayout.head_tail(length, 4)
        assert len({int(layout.positions(rank).sum()) for rank in range(4)}) == 1
    uneven = SequenceLayout.head_tail(61, 4)
    assert max(uneven.sizes) - min(uneven.sizes) <= 2


def test_overlaps_gaps_and_other_lengths_are_refused() -> None:
    for ranges in (
        (((0, 2),), ((1, 4),)),
        (((0, 2),), ((3, 4),)),
        (((1, 2),),),
        (((0, 2), (2, 2)),),
    ):
        with pytest.raises(LayoutError, match="every position exactly once"):
            SequenceLayout(ranges)
    with pytest.raises(LayoutError, match="must have 8 positions"):
        SequenceLayout.contiguous(8, 2).shard(torch.zeros(3, 7), 1, 0)


def test_a_tile_of_a_window_has_the_keys_that_its_queries_may_read_and_no_others() -> None:
    # A tile that took all keys gave the right values, at the cost of attention without a window.
    layout = SequenceLayout.contiguous(4096, 2)
    mask = AttentionMask(causal=True, window=(100, None))
    pairs = 0
    for rank in range(2):
        for owner in range(2):
            for tile in tiles(layout, rank, owner, mask):
                queries = tile.queries.stop - tile.queries.start
                keys = tile.keys.stop - tile.keys.start
                assert keys <= queries + 100
                pairs += queries * keys
    # The window itself has 4096 x 101 pairs of a query and a key. Tiles of 512 queries round them
    # up.
    assert pairs + 100 * 101 // 2 >= 4096 * 101
    assert pairs <= 4096 * (512 + 100)
