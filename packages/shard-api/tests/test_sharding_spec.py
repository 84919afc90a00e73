"""Checks of lists of shards, and overrides by class of spec.

Covers: spec/metadata.py, ops/dispatch.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sharding_cases import placements, shard
from shoal_shard_api import (
    ChunkShardingSpec,
    ShardedTensorMetadata,
    ShardingSpec,
    TensorProperties,
    _dispatch_custom_op,
    _has_custom_op,
    check_tensor,
    custom_sharding_spec_op,
)
from shoal_shard_api.errors import ShardingSpecError, UnsupportedOpError


def test_a_shard_that_reaches_beyond_the_tensor_is_named() -> None:
    with pytest.raises(
        ShardingSpecError, match=r"shard 0 \[0:3, 0:4\] on rank:0/cpu reaches beyond .*\(2, 4\)"
    ):
        check_tensor([shard([0, 0], [3, 4])], (2, 4))
    with pytest.raises(ShardingSpecError, match="has 2 dims, but the tensor of size"):
        check_tensor([shard([0, 0], [3, 4])], (3,))
    with pytest.raises(ShardingSpecError, match="at least one shard"):
        check_tensor([], (3,))


class _OnRankZero(ShardingSpec):
    """A user's spec: everything on rank 0."""

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        return ShardedTensorMetadata(
            [shard([0] * len(tensor_sizes), list(tensor_sizes))], tensor_sizes, tensor_properties
        )


def test_ops_overridden_for_a_kind_of_spec() -> None:
    @custom_sharding_spec_op(_OnRankZero, torch.lgamma)
    def lgamma(types: object, args: object, kwargs: object, process_group: object) -> str:
        return "overridden"

    assert _has_custom_op(_OnRankZero(), torch.lgamma)
    assert not _has_custom_op(ChunkShardingSpec(0, placements(0)), torch.lgamma)
    unused: Any = None
    result = _dispatch_custom_op(_OnRankZero(), torch.lgamma, (), (), {}, unused)
    assert result == "overridden"
    with pytest.raises(UnsupportedOpError, match="not overridden for _OnRankZero"):
        _dispatch_custom_op(_OnRankZero(), torch.relu, (), (), {}, unused)
