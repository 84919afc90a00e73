"""Shard metadata, placements and tensor properties.  Covers: spec/metadata.py, _torch.py."""

from __future__ import annotations

import pickle

import pytest
import torch

from shoal_shard_api import ShardMetadata, TensorProperties
from shoal_shard_api.errors import ShardingSpecError


@pytest.mark.parametrize("placement", ["rank:x/cpu", "rank:0/nonsense", "a/b/c", 3])
def test_a_placement_that_does_not_parse(placement: object) -> None:
    with pytest.raises(ShardingSpecError, match="placement must read"):
        ShardMetadata([0], [1], placement)  # type: ignore[arg-type]  # the mistake under test


def test_a_placement_without_a_rank() -> None:
    for placement in ("cpu", "trainer0/cpu", None):
        with pytest.raises(ShardingSpecError, match="RPC worker names are not supported"):
            assert ShardMetadata([0], [1], placement).rank


def test_shard_metadata_is_checked() -> None:
    with pytest.raises(ShardingSpecError, match=r"2 offsets .* 1 sizes"):
        ShardMetadata([0, 0], [1])
    with pytest.raises(ShardingSpecError, match="both at least 0"):
        ShardMetadata([0], [-1])


@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format]
)
def test_properties_survive_pickling(memory_format: torch.memory_format) -> None:
    properties = TensorProperties(torch.bfloat16, requires_grad=True, memory_format=memory_format)
    assert pickle.loads(pickle.dumps(properties)) == properties
    tensor = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    assert TensorProperties.create_from_tensor(tensor) == TensorProperties(
        torch.float64, requires_grad=True, strides=(1,)
    )
    with pytest.raises(ShardingSpecError, match="cannot be saved"):
        pickle.dumps(TensorProperties(memory_format=torch.channels_last_3d))


def test_properties_have_the_strides_of_the_tensor() -> None:
    """Torch 2.15 has them, and files of earlier versions do not."""
    properties = TensorProperties.create_from_tensor(torch.zeros(4, 3).t())
    assert properties.strides == (1, 3)
    assert TensorProperties().strides is None
    assert properties != TensorProperties() == TensorProperties.of_shards_like(torch.zeros(4, 3))
    assert pickle.loads(pickle.dumps(properties)) == properties
    earlier = TensorProperties.__new__(TensorProperties)
    state = properties.__getstate__()
    del state["strides"]
    earlier.__setstate__(state)
    assert earlier == TensorProperties()
