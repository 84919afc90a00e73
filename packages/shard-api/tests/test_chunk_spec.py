"""Chunks in any order, and the dims that have them.  Covers: spec/specs.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from sharding_cases import placements
from shoal_shard_api import (
    ChunkShardingSpec,
    TensorProperties,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
)
from shoal_shard_api.errors import ShardingSpecError

PLAIN = TensorProperties()


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(size: int, chunks: int) -> None:
    spec = ChunkShardingSpec(0, placements(*range(chunks)))
    sizes = [
        each.shard_sizes[0]
        for each in spec.build_metadata(torch.Size([size, 2]), PLAIN).shards_metadata
    ]
    expected = [len(chunk) for chunk in torch.empty(size).chunk(chunks)] if size else []
    assert [n for n in sizes if n] == [n for n in expected if n]
    assert len(sizes) == chunks
    split = get_split_size(size, chunks)
    assert sizes == [get_chunked_dim_size(size, split, index) for index in range(chunks)]


def test_an_empty_chunk_begins_where_the_tensor_ends() -> None:
    last = (
        ChunkShardingSpec(1, placements(0, 1, 2, 3))
        .build_metadata(torch.Size([2, 5]), PLAIN)
        .shards_metadata[-1]
    )
    assert (last.shard_offsets, last.shard_sizes) == ([0, 5], [2, 0])


def test_placements_may_be_in_any_order() -> None:
    shards = (
        ChunkShardingSpec(-1, placements(2, 0, 1))
        .build_metadata(torch.Size([2, 6]), PLAIN)
        .shards_metadata
    )
    assert [(each.rank, each.shard_offsets) for each in shards] == [
        (2, [0, 0]),
        (0, [0, 2]),
        (1, [0, 4]),
    ]
    spec = ChunkShardingSpec(1, placements(2, 0, 1))
    assert get_chunk_sharding_params(6, 3, spec, 0) == (2, 2)
    with pytest.raises(ShardingSpecError, match="rank 7 does not hold a chunk"):
        get_chunk_sharding_params(6, 3, spec, 7)


@pytest.mark.parametrize("dim", [2.0, None, True])
def test_a_dim_that_is_no_integer_is_refused(dim: object) -> None:
    with pytest.raises(ShardingSpecError, match="dim is an int or a str, got"):
        ChunkShardingSpec(dim, placements(0))  # type: ignore[arg-type]  # the mistake under test


def test_a_dim_by_name() -> None:
    spec = ChunkShardingSpec("rows", placements(0, 1))
    assert spec.on_names(("batch", "rows")) == ChunkShardingSpec(1, placements(0, 1))
    with pytest.raises(ShardingSpecError, match=r"not have a dim named 'rows'.*'batch', 'columns'"):
        spec.on_names(("batch", "columns"))
    with pytest.raises(ShardingSpecError, match="is a name"):
        spec.build_metadata(torch.Size([2, 2]), PLAIN)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_the_tensor_does_not_have(dim: int) -> None:
    with pytest.raises(ShardingSpecError, match=rf"dim {dim} .*\(4, 4\)"):
        ChunkShardingSpec(dim, placements(0)).build_metadata(torch.Size([4, 4]), PLAIN)


def test_no_placements() -> None:
    with pytest.raises(ShardingSpecError, match="at least one placement"):
        ChunkShardingSpec(0, [])
