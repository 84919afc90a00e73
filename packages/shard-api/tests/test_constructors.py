"""ShardedTensors from specs, local shards, local tensors and metadata.

Covers: tensor/sharded_tensor_base.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from sharding_cases import FULL, chunk, sharded
from shoal_mesh.testing import fake_world, on_ranks
from shoal_shard_api import Shard, ShardedTensor, TensorProperties, empty, init_from_local_shards
from shoal_shard_api.errors import LocalShardError, ShardingSpecError, UnsupportedOpError


@on_ranks(4)
def test_the_constructor_allocates_this_ranks_shards() -> None:
    tensor = ShardedTensor(chunk(0, (2, 0, 3, 1)), 6, 5, dtype=torch.float64, requires_grad=True)
    at = (2, 0, 3, 1).index(dist.get_rank())
    (shard,) = tensor.local_shards()
    assert shard.metadata.shard_offsets == [min(2 * at, 6), 0]
    assert list(shard.tensor.shape) == [2 if at < 3 else 0, 5] == shard.metadata.shard_sizes
    assert (tensor.shape, tensor.dtype, tensor.requires_grad, tensor.is_leaf) == (
        (6, 5),
        torch.float64,
        True,
        True,
    )
    assert tensor.local_tensor() is shard.tensor
    assert tensor.metadata().tensor_properties == TensorProperties(
        torch.float64, requires_grad=True
    )
    assert len(tensor) == 6
    assert tensor.numel() == 30
    assert tensor.stride() == (5, 1)
    assert not tensor.is_pinned()
    assert "ChunkShardingSpec" in repr(tensor)


@fake_world(4)
def test_what_the_constructor_refuses() -> None:
    with pytest.raises(
        ShardingSpecError, match=r"rank:7/cpu: global rank 7 is not among .*\[0, 1, 2, 3\]"
    ):
        empty(chunk(0, (0, 7)), 4)
    with pytest.raises(ShardingSpecError, match=r"torch.channels_last"):
        empty(chunk(0), 2, 3, 4, 4, memory_format=torch.channels_last)
    with pytest.raises(UnsupportedOpError, match="RPC"):
        empty(chunk(0), 4, init_rrefs=True)
    with pytest.raises(TypeError, match="must be integers"):
        empty(chunk(0), 4.5)
    with pytest.raises(TypeError, match="does not infer dims"):
        empty(chunk(0), 4, None)
    with pytest.raises(UnsupportedOpError, match="RPC"):
        empty(chunk(0), 4).remote_shards()


@on_ranks(4)
def test_init_from_local_shards() -> None:
    rank = dist.get_rank()
    shards = [Shard.from_tensor_and_offsets(torch.full((1, 3), float(rank)), [rank, 0], rank)]
    tensor = init_from_local_shards(shards, 4, 3)
    assert tensor.sharding_spec() == chunk(0)
    assert torch.equal(tensor.full_tensor(), torch.arange(4.0)[:, None].expand(4, 3))
    assert tensor.local_tensor() is shards[0].tensor
    lined_up = init_from_local_shards(
        [Shard.from_tensor_and_offsets(torch.full((rank, 3), float(rank)), [0, 0], rank)], None, 3
    )
    assert lined_up.shape == (6, 3)
    assert lined_up.full_tensor()[:, 0].tolist() == [1, 2, 2, 3, 3, 3]


@on_ranks(4)
def test_init_from_a_local_tensor_shares_it() -> None:
    local = torch.full((2, 3), float(dist.get_rank()))
    tensor = ShardedTensor._init_from_local_tensor(local, chunk(0), [8, 3])
    assert tensor.local_tensor() is local
    with pytest.raises(LocalShardError, match=r"size \[2, 3\]"):
        ShardedTensor._init_from_local_tensor(local, chunk(0), [12, 3])
    with pytest.raises(LocalShardError, match="not contiguous"):
        ShardedTensor._init_from_local_tensor(torch.zeros(3, 2).t(), chunk(0), [8, 3])
    with pytest.raises(LocalShardError, match="2 shards"):
        ShardedTensor._init_from_local_tensor(local, chunk(0, [dist.get_rank()] * 2), [4, 3])


@on_ranks(4)
def test_init_from_global_metadata() -> None:
    tensor = sharded(chunk(0))
    metadata = tensor.metadata()
    again = ShardedTensor._init_from_local_shards_and_global_metadata(
        tensor.local_shards(), metadata
    )
    assert again.sharding_spec() == chunk(0)
    assert torch.equal(again, FULL)
    with pytest.raises(LocalShardError, match="must pass the shards"):
        ShardedTensor._init_from_local_shards_and_global_metadata([], metadata)
    wrong = replace(
        metadata, tensor_properties=replace(metadata.tensor_properties, dtype=torch.int32)
    )
    with pytest.raises(
        LocalShardError, match=r"dtype is torch.float32, but the sharded tensor's is torch.int32"
    ):
        ShardedTensor._init_from_local_shards_and_global_metadata(tensor.local_shards(), wrong)
    gap = replace(metadata, shards_metadata=metadata.shards_metadata[:2])
    with pytest.raises(ShardingSpecError, match="no shard holds"):
        ShardedTensor._init_from_local_shards_and_global_metadata(tensor.local_shards(), gap)
