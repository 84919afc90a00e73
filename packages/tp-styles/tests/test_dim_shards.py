"""Dims of heads over ranks.  Covers: sharding/module_sharding.py."""

from __future__ import annotations

import pytest

from shoal_dtensor import Replicate, Shard
from shoal_mesh import abstract_mesh
from shoal_tp_styles import Heads, LayoutError
from shoal_tp_styles.sharding.module_sharding import HeadShard


@pytest.mark.parametrize(
    ("count", "ranks", "sizes"),
    [(8, 4, None), (6, 4, (10, 10, 5, 5)), (4, 4, None), (5, 2, (15, 10))],
)
def test_shards_hold_complete_heads(count: int, ranks: int, sizes: tuple[int, ...] | None) -> None:
    expected = Shard(0, multiple_of=5) if sizes is None else Shard(0, sizes=sizes)
    assert HeadShard(0, Heads(count, 5)).on(ranks) == expected


def test_fewer_heads_than_ranks_are_replicated_over_neighbours() -> None:
    heads, mesh = Heads(2, 5), abstract_mesh((8,), ("tp",))
    assert heads.replicated(8) and not heads.replicated(2)
    assert heads.mesh(mesh).shape == (2, 4)
    assert heads.placements(mesh) == (Shard(0, multiple_of=5), Replicate())


def test_heads_that_ranks_cannot_hold_are_refused() -> None:
    with pytest.raises(LayoutError, match="3 heads cannot be sharded over 4 ranks"):
        HeadShard(0, Heads(3, 5)).on(4)
