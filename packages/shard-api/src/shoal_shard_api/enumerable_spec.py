"""EnumerableShardingSpec: every shard named; and the spec that explains a given list of shards best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .chunk_spec import ChunkShardingSpec
from .errors import ShardingSpecError
from .metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from .spec import ShardingSpec, check_tensor, validate_non_overlapping_shards_metadata


@dataclass(frozen=True, eq=True)
class EnumerableShardingSpec(ShardingSpec):
    """Any set of boxes that do not overlap; a rank may hold several of them, or none.

    Raises:
        ShardingSpecError: No shards, shards that overlap (both are named), or that differ in the number of dims.

    Example:
        >>> spec = EnumerableShardingSpec([
        ...     ShardMetadata([0, 0], [1, 4], "rank:0/cpu"), ShardMetadata([1, 0], [3, 4], "rank:1/cpu")])
        >>> len(spec.build_metadata(torch.Size([4, 4]), TensorProperties()).shards_metadata)
        2
    """

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        if not self.shards:
            raise ShardingSpecError("EnumerableShardingSpec needs at least one shard, got none")
        object.__setattr__(self, "shards", list(self.shards))
        validate_non_overlapping_shards_metadata(self.shards)

    def __hash__(self) -> int:
        return hash(tuple(self.shards))

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """The shards as given, after a check that they hold every element of a tensor of this size, and none beyond."""
        check_tensor(self.shards, tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), torch.Size(tensor_sizes), tensor_properties)


def _infer_sharding_spec_from_shards_metadata(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """The ChunkShardingSpec whose shards these are, in any order; else the EnumerableShardingSpec of them.

    Raises:
        ShardingSpecError: The shards overlap.
    """
    shards = list(shards_metadata)
    if not shards or any(shard.placement is None for shard in shards) or not shards[0].shard_sizes:
        return EnumerableShardingSpec(shards)
    size = [max(shard.shard_offsets[d] + shard.shard_sizes[d] for shard in shards) for d in range(_ndim(shards))]
    cut = [d for d, n in enumerate(size) if any(shard.shard_sizes[d] != n for shard in shards)]
    if len(cut) > 1:
        return EnumerableShardingSpec(shards)
    dim = cut[0] if cut else 0
    # An empty chunk may claim to begin anywhere; the order of the others is by offset.
    filled = [s for s in shards if s.shard_sizes[dim] > 0]
    empty = [s for s in shards if s.shard_sizes[dim] == 0]
    ordered = sorted(filled, key=lambda shard: shard.shard_offsets[dim]) + empty
    chunked = ChunkShardingSpec(dim, [s.placement for s in ordered if s.placement is not None])
    wanted = chunked.build_metadata(torch.Size(size), TensorProperties()).shards_metadata
    same = all(a.box == b.box for a, b in zip(wanted, ordered, strict=True) if a.shard_sizes[dim] > 0)
    sizes_agree = [a.shard_sizes for a in wanted] == [b.shard_sizes for b in ordered]
    return chunked if same and sizes_agree else EnumerableShardingSpec(shards)


def _ndim(shards: Sequence[ShardMetadata]) -> int:
    return min(len(shard.shard_sizes) for shard in shards)
