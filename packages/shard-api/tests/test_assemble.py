"""Local shards of several ranks that do not form a tensor.  Covers: tensor/shard.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_mesh.testing import on_ranks
from shoal_shard_api import Shard, init_from_local_shards
from shoal_shard_api.errors import LocalShardError, RankMismatchError, ShardingSpecError


@on_ranks(4)
def test_local_shards_that_do_not_make_a_tensor_are_refused_on_all_ranks() -> None:
    rank = dist.get_rank()

    def shard(offset: int, rows: int = 1, owner: int = rank, **options: Any) -> Shard:
        return Shard.from_tensor_and_offsets(torch.zeros(rows, 3, **options), [offset, 0], owner)

    cases: list[tuple[list[Shard], type[Exception], str]] = [
        ([shard(rank, 2)], ShardingSpecError, "shards 0 .* and 1 .* overlap"),
        ([shard(2 * rank)], ShardingSpecError, "reaches beyond"),
        (
            [shard(rank)] if rank != 2 else [],
            ShardingSpecError,
            r"no shard holds the elements \[2:3, 0:3\]",
        ),
        (
            [shard(rank, owner=0)],
            LocalShardError,
            r"^rank 1: a local shard is placed on rank:0/cpu, but this is rank 1; rank 2: .*; rank "
            r"3: ",
        ),
        (
            [shard(rank, dtype=torch.float64 if rank == 3 else torch.float32)],
            RankMismatchError,
            "dtype.*float32.*rank 0.*float64.*rank 3",
        ),
        (
            [shard(rank, requires_grad=rank == 1)],
            RankMismatchError,
            "requires_grad.*False on rank 0.*True on rank 1",
        ),
        ([shard(rank), shard(rank, dtype=torch.int32)], LocalShardError, "dtype is torch.int32"),
        ([], ShardingSpecError, "at least one rank must have a local shard"),
    ]
    for shards, kind, text in cases:
        with pytest.raises(kind, match=text):
            init_from_local_shards(shards, 4, 3)
    with pytest.raises(RankMismatchError, match="global size"):
        init_from_local_shards([shard(rank)], 4 + rank, 3)
    with pytest.raises(LocalShardError, match="needs one shard on every rank"):
        init_from_local_shards([], None, 3)
    with pytest.raises(ShardingSpecError, match="at most one dim"):
        init_from_local_shards([shard(rank)], None, None)
