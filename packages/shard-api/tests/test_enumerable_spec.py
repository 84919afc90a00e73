"""Listed shards, and specs inferred from shards.  Covers: spec/specs.py."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from sharding_cases import placements, shard
from shoal_shard_api import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    ShardMetadata,
    TensorProperties,
    _infer_sharding_spec_from_shards_metadata,
    validate_non_overlapping_shards_metadata,
)
from shoal_shard_api.errors import ShardingSpecError

PLAIN = TensorProperties()


def test_overlapping_shards_are_named() -> None:
    shards = [shard([0, 0], [2, 4]), shard([3, 0], [2, 4], 1), shard([1, 1], [1, 1], 2)]
    with pytest.raises(
        ShardingSpecError,
        match=r"0 \[0:2, 0:4\] on rank:0/cpu and 2 \[1:2, 1:2\] on rank:2/cpu overlap",
    ):
        EnumerableShardingSpec(shards)
    validate_non_overlapping_shards_metadata(shards[:2])


def test_shards_with_different_numbers_of_dims() -> None:
    with pytest.raises(ShardingSpecError, match=r"shard 1 .* has 1"):
        EnumerableShardingSpec([shard([0, 0], [2, 4]), shard([2], [1], 1)])


def test_a_gap_is_named() -> None:
    spec = EnumerableShardingSpec([shard([0, 0], [2, 4]), shard([2, 0], [2, 2], 1)])
    with pytest.raises(
        ShardingSpecError,
        match=r"no shard holds the elements \[2:4, 2:4\] of the tensor of size \(4, 4\)",
    ):
        spec.build_metadata(torch.Size([4, 4]), PLAIN)


def test_an_enumerable_spec_without_shards() -> None:
    with pytest.raises(ShardingSpecError, match="at least one shard"):
        EnumerableShardingSpec([])


@given(st.integers(1, 30), st.permutations([0, 1, 2, 3]), st.integers(0, 1), st.randoms())
def test_a_chunk_spec_is_inferred_from_its_shards(  # type: ignore[no-untyped-def]  # hypothesis
    size, order, dim, random
) -> None:
    spec = ChunkShardingSpec(dim, placements(*order))
    shape = torch.Size([size, 7] if dim == 0 else [7, size])
    shards = list(spec.build_metadata(shape, PLAIN).shards_metadata)
    random.shuffle(shards)
    inferred = _infer_sharding_spec_from_shards_metadata(shards)
    assert isinstance(inferred, ChunkShardingSpec)
    assert inferred.dim == dim or size == 1
    rebuilt = inferred.build_metadata(shape, PLAIN).shards_metadata
    assert {each for each in rebuilt if 0 not in each.shard_sizes} == {
        s for s in shards if 0 not in s.shard_sizes
    }


@pytest.mark.parametrize(
    "shards",
    [
        pytest.param([shard([0, 0], [1, 4]), shard([1, 0], [3, 4], 1)], id="uneven"),
        pytest.param(
            [shard([2 * i, 2 * j], [2, 2], 2 * i + j) for i in (0, 1) for j in (0, 1)], id="grid"
        ),
    ],
)
def test_other_shards_give_an_enumerable_spec(shards: list[ShardMetadata]) -> None:
    assert _infer_sharding_spec_from_shards_metadata(shards) == EnumerableShardingSpec(shards)


def test_one_shard_is_a_chunk_spec() -> None:
    assert _infer_sharding_spec_from_shards_metadata([shard([0, 0], [3, 4])]) == ChunkShardingSpec(
        0, placements(0)
    )


def test_specs_are_values() -> None:
    spec = ChunkShardingSpec(0, placements(0, 1))
    assert spec == pickle.loads(pickle.dumps(spec))
    assert hash(spec) == hash(ChunkShardingSpec(0, placements(0, 1)))
    assert spec != ChunkShardingSpec(0, placements(1, 0))
    cells = EnumerableShardingSpec([shard([0], [1])])
    assert cells == pickle.loads(pickle.dumps(cells))
    assert len({cells, spec}) == 2
    text: Any = "rank:1/cpu"
    assert DevicePlacementSpec(text).device.rank() == 1
