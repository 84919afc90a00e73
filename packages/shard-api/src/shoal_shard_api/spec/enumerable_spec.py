"""EnumerableShardingSpec, a list of shards; and the simplest spec of a given list of shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal_dtensor.internal import Box, volume
from shoal_mesh.internal import dataclass

from .._torch import RemoteDevice
from ..arguments import expect_all
from ..errors import ShardingSpecError
from .chunk_spec import ChunkShardingSpec
from .metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from .sharding_spec import ShardingSpec, check_build_arguments, check_tensor, validate_non_overlapping_shards_metadata


@dataclass(frozen=True, eq=True)
class EnumerableShardingSpec(ShardingSpec):
    """Any shards that do not overlap; a rank may hold several of them, or none.

    Args:
        shards: Metadata of all shards of a tensor.

    Raises:
        ShardingSpecError: No shards, an entry that is no ShardMetadata, shards that overlap (both are named), or
            shards that differ in the number of dims.

    Example:
        >>> spec = EnumerableShardingSpec([
        ...     ShardMetadata([0, 0], [1, 4], "rank:0/cpu"), ShardMetadata([1, 0], [3, 4], "rank:1/cpu")])
        >>> len(spec.build_metadata(torch.Size([4, 4]), TensorProperties()).shards_metadata)
        2
    """

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        expect_all("EnumerableShardingSpec", "shards", self.shards, ShardMetadata, error=ShardingSpecError)
        if not self.shards:
            raise ShardingSpecError("EnumerableShardingSpec needs at least one shard, got none")
        validate_non_overlapping_shards_metadata(self.shards)
        object.__setattr__(self, "shards", list(self.shards))

    def __hash__(self) -> int:
        return hash(tuple(self.shards))

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """The shards as given, if they cover a tensor of this size exactly.

        Args:
            tensor_sizes: Global size.
            tensor_properties: Properties of the shards.

        Raises:
            ArgumentTypeError: An argument has a wrong type.
            ShardingSpecError: They do not; names the shard that reaches beyond, or the elements in no shard.
        """
        check_build_arguments(self, tensor_sizes, tensor_properties)
        check_tensor(self.shards, tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), torch.Size(tensor_sizes), tensor_properties)


def _infer_sharding_spec_from_shards_metadata(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """The ChunkShardingSpec with these shards, in any order, if there is one; else an EnumerableShardingSpec.

    Args:
        shards_metadata: All shards of a tensor.

    Raises:
        ArgumentTypeError: They are no sequence of ShardMetadata.
        ShardingSpecError: The shards overlap.
    """
    expect_all("_infer_sharding_spec_from_shards_metadata", "shards_metadata", shards_metadata, ShardMetadata)
    shards = list(shards_metadata)
    if not shards or any(shard.placement is None for shard in shards) or not shards[0].shard_sizes:
        return EnumerableShardingSpec(shards)
    # Where an empty shard begins says nothing: torch writes an offset behind the end of the dim.
    size = [
        max((s.shard_offsets[d] + s.shard_sizes[d] for s in shards if s.shard_sizes[d]), default=0)
        for d in range(min(len(s.shard_sizes) for s in shards))
    ]
    sharded = [d for d, n in enumerate(size) if any(shard.shard_sizes[d] != n for shard in shards)]
    if len(sharded) > 1:
        return EnumerableShardingSpec(shards)
    dim = sharded[0] if sharded else 0
    # It is ordered last: torch.chunk has its empty chunks there too.
    filled = [s for s in shards if s.shard_sizes[dim] > 0]
    empty = [s for s in shards if s.shard_sizes[dim] == 0]
    ordered = sorted(filled, key=lambda shard: shard.shard_offsets[dim]) + empty
    chunked = ChunkShardingSpec(dim, [s.placement for s in ordered if s.placement is not None])
    expected = chunked.build_metadata(torch.Size(size), TensorProperties()).shards_metadata
    same = all(a.box == b.box for a, b in zip(expected, ordered, strict=True) if a.shard_sizes[dim] > 0)
    sizes_agree = [a.shard_sizes for a in expected] == [b.shard_sizes for b in ordered]
    return chunked if same and sizes_agree else EnumerableShardingSpec(shards)


def spec_of(layout: Sequence[tuple[int, Box]], devices: dict[int, RemoteDevice]) -> ShardingSpec:
    """The sharding spec with this layout: a ChunkShardingSpec if there is one, else an EnumerableShardingSpec.

    Args:
        layout: Global rank and box of every shard, at most one per rank.
        devices: Placement of every global rank.
    """
    shards = [
        ShardMetadata([start for start, _ in box], [stop - start for start, stop in box], devices[rank])
        for rank, box in layout
    ]
    inferred = _infer_sharding_spec_from_shards_metadata(shards)
    if isinstance(inferred, ChunkShardingSpec):
        return inferred
    # An empty shard is kept only in a ChunkShardingSpec, whose placements it belongs to.
    return EnumerableShardingSpec([shard for shard in shards if volume(shard.box) > 0] or shards[:1])
