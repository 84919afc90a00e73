"""ChunkShardingSpec: one tensor dim cut as ``torch.chunk`` cuts it, chunk i on placement i."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ._torch import RemoteDevice
from .errors import ShardingSpecError
from .metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, parse_placement
from .spec import ShardingSpec


@dataclass(frozen=True, eq=True)
class ChunkShardingSpec(ShardingSpec):
    """One dim cut into as many chunks as there are placements, sized as ``torch.chunk`` sizes them.

    Later chunks may be smaller or empty.  The order of the placements is free, and a rank may hold several chunks.

    Args:
        dim: Tensor dim to cut; negative counts from the end, a text is a name that ``on_names`` turns
            into an index (torch's tensors have no names any more).
        placements: Holder of each chunk: "rank:1/cuda:1", a global rank and a device there.

    Example:
        >>> spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
        >>> [s.shard_sizes for s in spec.build_metadata(torch.Size([5, 2]), TensorProperties()).shards_metadata]
        [[3, 2], [2, 2]]
    """

    dim: int | str
    placements: list[RemoteDevice]

    def __init__(self, dim: int | str, placements: Sequence[str | RemoteDevice]) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int | str):
            raise ShardingSpecError(f"ChunkShardingSpec: dim must be an integer or the name of a dim, got {dim!r}")
        parsed = [parse_placement(each) for each in placements]
        if not parsed:
            raise ShardingSpecError("ChunkShardingSpec needs at least one placement, got none")
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "placements", parsed)

    def __hash__(self) -> int:
        return hash((self.dim, tuple(self.placements)))

    def on_names(self, names: Sequence[str | None]) -> ChunkShardingSpec:
        """The spec with the dim's index among ``names`` in place of its name.

        Raises:
            ShardingSpecError: No dim has that name; lists the names.
        """
        if not isinstance(self.dim, str):
            return self
        if self.dim not in names:
            raise ShardingSpecError(f"the tensor has no dim {self.dim!r}; the names of its dims are {tuple(names)}")
        return ChunkShardingSpec(list(names).index(self.dim), self.placements)

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """One shard per placement; an empty one begins where the tensor ends."""
        ndim = len(tensor_sizes)
        if isinstance(self.dim, str):
            raise ShardingSpecError(
                f"dim {self.dim!r} is a name, and sizes {tuple(tensor_sizes)} have none: "
                "turn it into an index with on_names()"
            )
        if not -ndim <= self.dim < ndim:
            raise ShardingSpecError(f"dim {self.dim} is not a dim of a tensor of size {tuple(tensor_sizes)}")
        dim = self.dim % ndim
        total = tensor_sizes[dim]
        split = get_split_size(total, len(self.placements))
        shards = []
        for index, placement in enumerate(self.placements):
            offsets, sizes = [0] * ndim, list(tensor_sizes)
            offsets[dim] = min(split * index, total)
            sizes[dim] = get_chunked_dim_size(total, split, index)
            shards.append(ShardMetadata(offsets, sizes, placement))
        return ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)


def get_split_size(dim_size: int, chunks: int) -> int:
    """Size of every chunk but the last ones, as ``torch.chunk`` has it: dim_size / chunks, rounded up."""
    return (dim_size + chunks - 1) // chunks


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """Size of chunk ``idx``: ``split_size``, or what is left, or 0."""
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """First index and size, along the cut dim, of the chunk that global rank ``rank`` holds.

    Raises:
        ShardingSpecError: The rank holds none.
    """
    split = get_split_size(sharding_dim_size, world_size)
    for index, placement in enumerate(spec.placements):
        if placement.rank() == rank:
            return min(split * index, sharding_dim_size), get_chunked_dim_size(sharding_dim_size, split, index)
    raise ShardingSpecError(f"rank {rank} holds no chunk; the placements are {spec.placements}")
