"""One shard and its metadata.  Covers: tensor/shard.py."""

from __future__ import annotations

import pytest
import torch

from sharding_cases import FULL
from shoal_shard_api import Shard, ShardMetadata, narrow_tensor, narrow_tensor_by_index
from shoal_shard_api.errors import LocalShardError, ShardingSpecError


def test_a_shard_fits_its_metadata() -> None:
    with pytest.raises(LocalShardError, match=r"size \[2\], but its metadata says \[3\]"):
        Shard(torch.zeros(2), ShardMetadata([0], [3], "rank:0/cpu"))
    with pytest.raises(LocalShardError, match="is on cpu, but its placement is rank:0/cuda:0"):
        Shard(torch.zeros(2), ShardMetadata([0], [2], "rank:0/cuda:0"))
    assert torch.equal(narrow_tensor(FULL, ShardMetadata([2, 1], [2, 3])), FULL[2:4, 1:4])
    with pytest.raises(ShardingSpecError, match="is not inside a tensor of size"):
        narrow_tensor_by_index(FULL, [1], [1])
