"""Specs: what they describe, what they refuse, and how they are inferred.

Covers: metadata.py, spec.py, chunk_spec.py, enumerable_spec.py.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal_shard_api import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardingSpecError,
    ShardMetadata,
    TensorProperties,
    UnsupportedOpError,
    _dispatch_custom_op,
    _has_custom_op,
    _infer_sharding_spec_from_shards_metadata,
    check_tensor,
    custom_sharding_spec_op,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
    validate_non_overlapping_shards_metadata,
)

PLAIN = TensorProperties()


def ranks(*order: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in order]


def shard(offsets: list[int], sizes: list[int], rank: int = 0) -> ShardMetadata:
    return ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(size: int, chunks: int) -> None:
    spec = ChunkShardingSpec(0, ranks(*range(chunks)))
    sizes = [each.shard_sizes[0] for each in spec.build_metadata(torch.Size([size, 2]), PLAIN).shards_metadata]
    expected = [len(piece) for piece in torch.empty(size).chunk(chunks)] if size else []
    assert [n for n in sizes if n] == [n for n in expected if n]
    assert len(sizes) == chunks
    split = get_split_size(size, chunks)
    assert sizes == [get_chunked_dim_size(size, split, index) for index in range(chunks)]


def test_an_empty_chunk_begins_where_the_tensor_ends() -> None:
    last = ChunkShardingSpec(1, ranks(0, 1, 2, 3)).build_metadata(torch.Size([2, 5]), PLAIN).shards_metadata[-1]
    assert (last.shard_offsets, last.shard_sizes) == ([0, 5], [2, 0])


def test_placements_may_be_in_any_order() -> None:
    found = ChunkShardingSpec(-1, ranks(2, 0, 1)).build_metadata(torch.Size([2, 6]), PLAIN).shards_metadata
    assert [(each.rank, each.shard_offsets) for each in found] == [(2, [0, 0]), (0, [0, 2]), (1, [0, 4])]
    spec = ChunkShardingSpec(1, ranks(2, 0, 1))
    assert get_chunk_sharding_params(6, 3, spec, 0) == (2, 2)
    with pytest.raises(ShardingSpecError, match="rank 7 holds no chunk"):
        get_chunk_sharding_params(6, 3, spec, 7)


@pytest.mark.parametrize("dim", [2.0, None, True])
def test_a_dim_that_is_no_integer_is_refused(dim: object) -> None:
    with pytest.raises(ShardingSpecError, match="integer or the name of a dim"):
        ChunkShardingSpec(dim, ranks(0))  # type: ignore[arg-type]  # the mistake under test


def test_a_dim_by_name() -> None:
    spec = ChunkShardingSpec("rows", ranks(0, 1))
    assert spec.on_names(("batch", "rows")) == ChunkShardingSpec(1, ranks(0, 1))
    with pytest.raises(ShardingSpecError, match=r"no dim 'rows'.*'batch', 'columns'"):
        spec.on_names(("batch", "columns"))
    with pytest.raises(ShardingSpecError, match="is a name"):
        spec.build_metadata(torch.Size([2, 2]), PLAIN)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_the_tensor_does_not_have(dim: int) -> None:
    with pytest.raises(ShardingSpecError, match=rf"dim {dim} .*\(4, 4\)"):
        ChunkShardingSpec(dim, ranks(0)).build_metadata(torch.Size([4, 4]), PLAIN)


@pytest.mark.parametrize("placement", ["rank:x/cpu", "rank:0/nonsense", "a/b/c", 3])
def test_a_placement_that_does_not_parse(placement: object) -> None:
    with pytest.raises(ShardingSpecError, match="placement must read"):
        ShardMetadata([0], [1], placement)  # type: ignore[arg-type]  # the mistake under test


def test_a_placement_without_a_rank() -> None:
    for placement in ("cpu", "trainer0/cpu", None):
        with pytest.raises(ShardingSpecError, match="RPC worker names are not supported"):
            assert ShardMetadata([0], [1], placement).rank


def test_no_placements() -> None:
    with pytest.raises(ShardingSpecError, match="at least one placement"):
        ChunkShardingSpec(0, [])


def test_shard_metadata_is_checked() -> None:
    with pytest.raises(ShardingSpecError, match=r"2 offsets .* 1 sizes"):
        ShardMetadata([0, 0], [1])
    with pytest.raises(ShardingSpecError, match=">= 0"):
        ShardMetadata([0], [-1])


def test_overlapping_shards_are_named() -> None:
    shards = [shard([0, 0], [2, 4]), shard([3, 0], [2, 4], 1), shard([1, 1], [1, 1], 2)]
    with pytest.raises(
        ShardingSpecError, match=r"0 \[0:2, 0:4\] on rank:0/cpu and 2 \[1:2, 1:2\] on rank:2/cpu overlap"
    ):
        EnumerableShardingSpec(shards)
    validate_non_overlapping_shards_metadata(shards[:2])


def test_shards_with_different_numbers_of_dims() -> None:
    with pytest.raises(ShardingSpecError, match=r"shard 1 .* has 1"):
        EnumerableShardingSpec([shard([0, 0], [2, 4]), shard([2], [1], 1)])


def test_a_gap_is_named() -> None:
    spec = EnumerableShardingSpec([shard([0, 0], [2, 4]), shard([2, 0], [2, 2], 1)])
    with pytest.raises(ShardingSpecError, match=r"no shard holds the part \[2:4, 2:4\] of the tensor of size \(4, 4\)"):
        spec.build_metadata(torch.Size([4, 4]), PLAIN)


def test_a_shard_that_sticks_out_is_named() -> None:
    with pytest.raises(ShardingSpecError, match=r"shard 0 \[0:3, 0:4\] on rank:0/cpu sticks out .*\(2, 4\)"):
        check_tensor([shard([0, 0], [3, 4])], (2, 4))
    with pytest.raises(ShardingSpecError, match="has 2 dims, the tensor of size"):
        check_tensor([shard([0, 0], [3, 4])], (3,))
    with pytest.raises(ShardingSpecError, match="at least one shard"):
        check_tensor([], (3,))


def test_an_enumerable_spec_without_shards() -> None:
    with pytest.raises(ShardingSpecError, match="at least one shard"):
        EnumerableShardingSpec([])


@given(st.integers(1, 30), st.permutations([0, 1, 2, 3]), st.integers(0, 1), st.randoms())
def test_a_chunk_spec_is_inferred_from_its_shards(size, order, dim, random) -> None:  # type: ignore[no-untyped-def]  # hypothesis
    spec = ChunkShardingSpec(dim, ranks(*order))
    shape = torch.Size([size, 7] if dim == 0 else [7, size])
    shards = list(spec.build_metadata(shape, PLAIN).shards_metadata)
    random.shuffle(shards)
    inferred = _infer_sharding_spec_from_shards_metadata(shards)
    assert isinstance(inferred, ChunkShardingSpec)
    assert inferred.dim == dim or size == 1
    found = inferred.build_metadata(shape, PLAIN).shards_metadata
    assert {each for each in found if 0 not in each.shard_sizes} == {s for s in shards if 0 not in s.shard_sizes}


@pytest.mark.parametrize(
    "shards",
    [
        pytest.param([shard([0, 0], [1, 4]), shard([1, 0], [3, 4], 1)], id="uneven"),
        pytest.param([shard([2 * i, 2 * j], [2, 2], 2 * i + j) for i in (0, 1) for j in (0, 1)], id="grid"),
    ],
)
def test_other_shards_give_an_enumerable_spec(shards: list[ShardMetadata]) -> None:
    assert _infer_sharding_spec_from_shards_metadata(shards) == EnumerableShardingSpec(shards)


def test_one_shard_is_a_chunk_spec() -> None:
    assert _infer_sharding_spec_from_shards_metadata([shard([0, 0], [3, 4])]) == ChunkShardingSpec(0, ranks(0))


def test_specs_are_values() -> None:
    spec = ChunkShardingSpec(0, ranks(0, 1))
    assert spec == pickle.loads(pickle.dumps(spec))
    assert hash(spec) == hash(ChunkShardingSpec(0, ranks(0, 1)))
    assert spec != ChunkShardingSpec(0, ranks(1, 0))
    cells = EnumerableShardingSpec([shard([0], [1])])
    assert cells == pickle.loads(pickle.dumps(cells))
    assert len({cells, spec}) == 2
    assert DevicePlacementSpec("rank:1/cpu").device.rank() == 1  # type: ignore[arg-type]  # text is parsed


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
def test_properties_survive_pickling(memory_format: torch.memory_format) -> None:
    properties = TensorProperties(torch.bfloat16, requires_grad=True, memory_format=memory_format)
    assert pickle.loads(pickle.dumps(properties)) == properties
    tensor = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    assert TensorProperties.create_from_tensor(tensor) == TensorProperties(torch.float64, requires_grad=True)
    with pytest.raises(ShardingSpecError, match="cannot be saved"):
        pickle.dumps(TensorProperties(memory_format=torch.channels_last_3d))


class _Whole(ShardingSpec):
    """A user's spec: everything on rank 0."""

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        return ShardedTensorMetadata(
            [shard([0] * len(tensor_sizes), list(tensor_sizes))], tensor_sizes, tensor_properties
        )


def test_ops_overridden_for_a_kind_of_spec() -> None:
    @custom_sharding_spec_op(_Whole, torch.lgamma)
    def lgamma(types: object, args: object, kwargs: object, process_group: object) -> str:
        return "overridden"

    assert _has_custom_op(_Whole(), torch.lgamma)
    assert not _has_custom_op(ChunkShardingSpec(0, ranks(0)), torch.lgamma)
    assert _dispatch_custom_op(_Whole(), torch.lgamma, (), (), {}, None) == "overridden"  # type: ignore[arg-type]  # unused
    with pytest.raises(UnsupportedOpError, match="not overridden for _Whole"):
        _dispatch_custom_op(_Whole(), torch.relu, (), (), {}, None)  # type: ignore[arg-type]  # unused
