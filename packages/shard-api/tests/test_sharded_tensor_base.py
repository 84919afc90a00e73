"""The class without a process group, and pickles.  Covers: tensor/sharded_tensor_base.py."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharding_cases import FULL, chunk, sharded
from shoal_mesh.testing import on_ranks
from shoal_shard_api import (
    Shard,
    ShardedTensor,
    ShardedTensorBase,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    load_with_process_group,
)
from shoal_shard_api.errors import ArgumentTypeError, LocalShardError, ShardingSpecError


@on_ranks(4)
def test_pickles_come_back_on_the_same_place_only() -> None:
    tensor = sharded(chunk(0))
    tensor.requires_grad_()
    buffer = io.BytesIO()
    torch.save({"w": tensor, "p": torch.nn.Parameter(tensor)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded["w"].detach(), FULL)
    assert loaded["w"].requires_grad
    assert isinstance(loaded["p"], torch.nn.Parameter)
    assert loaded["w"].sharding_spec() == chunk(0)
    text = pickle.dumps(tensor)
    with load_with_process_group(dist.distributed_c10d._get_default_group()):
        assert torch.equal(pickle.loads(text).detach(), FULL)


def test_the_base_class_needs_no_process_group() -> None:
    metadata = ShardedTensorMetadata(
        [ShardMetadata([0], [2], "rank:0/cpu"), ShardMetadata([2], [2], "rank:1/cpu")],
        torch.Size([4]),
        TensorProperties(),
    )
    shard = Shard(torch.ones(2), metadata.shards_metadata[0])
    base = ShardedTensorBase._init_from_local_shards_and_global_metadata([shard], metadata)
    assert base.local_shards() == [shard]
    assert base.metadata() == metadata
    assert base.sharding_spec() == chunk(0, (0, 1))
    assert tuple(base.size()) == (4,)
    stranger = Shard(torch.ones(1), ShardMetadata([0], [1], "rank:0/cpu"))
    with pytest.raises(LocalShardError, match="is not in the metadata"):
        ShardedTensorBase._init_from_local_shards_and_global_metadata([stranger], metadata)
    assert ShardedTensorBase(chunk(0, (0, 1)), 4, requires_grad=True).requires_grad


def test_the_strides_of_the_properties_are_those_of_the_tensor() -> None:
    """As in torch 2.15."""
    base = ShardedTensorBase(chunk(0, (0, 1)), 4, 3, strides=[1, 4])
    assert base.stride() == (1, 4) == base.metadata().tensor_properties.strides
    shards = [
        ShardMetadata([0, 0], [2, 3], "rank:0/cpu"),
        ShardMetadata([2, 0], [2, 3], "rank:1/cpu"),
    ]
    metadata = ShardedTensorMetadata(shards, torch.Size([4, 3]), TensorProperties(strides=(1, 4)))
    local = [Shard(torch.ones(2, 3), shards[0])]
    tensor = ShardedTensorBase._init_from_local_shards_and_global_metadata(local, metadata)
    assert tensor.stride() == (1, 4)
    with pytest.raises(ShardingSpecError, match=r"needs one stride per dim, got .*strides=\(1,\)"):
        ShardedTensorBase(chunk(0, (0, 1)), 4, 3, strides=[1])
    with pytest.raises(ArgumentTypeError, match="strides"):
        strides: Any = [1.5, 1]
        ShardedTensorBase(chunk(0, (0, 1)), 4, 3, strides=strides)


@on_ranks(2)
def test_results_have_strides_of_their_own() -> None:
    spec = chunk(0, (0, 1))
    tensor = ShardedTensor(spec, 4, 3, strides=(1, 4)).fill_(2.0)
    assert tensor.stride() == (1, 4)
    assert (tensor + 1).sum().item() == 36
    results: list[Any] = [tensor + 1, tensor.t(), tensor.contiguous()]
    for result in results:
        strides = result.metadata().tensor_properties.strides
        assert strides is None or strides == result.stride()


def test_the_base_class_takes_shards_of_several_dims() -> None:
    metadata = ShardedTensorMetadata(
        [ShardMetadata([0, 0], [4, 2], "rank:0/cpu"), ShardMetadata([0, 2], [4, 1], "rank:1/cpu")],
        torch.Size([4, 3]),
        TensorProperties(),
    )
    shards = [Shard(torch.ones(4, 2), metadata.shards_metadata[0])]
    tensor = ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, metadata)
    assert tensor.size() == (4, 3)
    assert torch.equal(tensor.local_shards()[0].tensor, torch.ones(4, 2))
