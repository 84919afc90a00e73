"""ChunkShardingSpec: one tensor dim sharded as ``torch.chunk`` splits it, chunk i on placement i."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal_mesh.internal import dataclass

from .._torch import RemoteDevice
from ..arguments import expect, expect_all
from ..errors import ShardingSpecError
from .metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, parse_placement
from .sharding_spec import ShardingSpec, check_build_arguments


@dataclass(frozen=True, eq=True)
class ChunkShardingSpec(ShardingSpec):
    """One tensor dim sharded into one chunk per placement, of the sizes of ``torch.chunk``.

    The last chunks may be smaller or empty.  Placements may be in any order, and a rank may hold several chunks.

    Args:
        dim: Tensor dim to shard; negative counts from the end.  A string is the name of a dim, which ``on_names``
            turns into an index (torch's tensors have no names any more).
        placements: Placement of each chunk: "rank:1/cuda:1" (a global rank and its device), or a parsed one.

    Raises:
        ShardingSpecError: ``dim`` is neither an integer nor a string, there is no placement, or one cannot be parsed.

    Example:
        >>> spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
        >>> [s.shard_sizes for s in spec.build_metadata(torch.Size([5, 2]), TensorProperties()).shards_metadata]
        [[3, 2], [2, 2]]
    """

    ShardingDim = int | str
    dim: int | str
    placements: list[RemoteDevice]

    def __init__(self, dim: int | str, placements: Sequence[str | RemoteDevice]) -> None:
        expect("ChunkShardingSpec", "dim", dim, int, str, error=ShardingSpecError)
        expect_all("ChunkShardingSpec", "placements", placements, str, RemoteDevice, error=ShardingSpecError)
        if not placements:
            raise ShardingSpecError("ChunkShardingSpec needs at least one placement, got none")
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "placements", [parse_placement(each) for each in placements])

    def __hash__(self) -> int:
        return hash((self.dim, tuple(self.placements)))

    def on_names(self, names: Sequence[str | None]) -> ChunkShardingSpec:
        """The spec with the index of the dim in ``names`` in place of its name.

        Args:
            names: Names of all dims of a tensor, None for a dim without one.

        Raises:
            ArgumentTypeError: The names are no sequence of strings or None.
            ShardingSpecError: No dim has that name; lists the names.

        Example:
            >>> ChunkShardingSpec("rows", ["rank:0/cpu"]).on_names(["batch", "rows"]).dim
            1
        """
        expect_all("on_names", "names", names, str, type(None))
        if not isinstance(self.dim, str):
            return self
        if self.dim not in names:
            raise ShardingSpecError(f"the tensor has no dim {self.dim!r}; the names of its dims are {tuple(names)}")
        return ChunkShardingSpec(list(names).index(self.dim), self.placements)

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """One shard per placement; an empty shard begins at the end of the dim.

        Args:
            tensor_sizes: Global size.
            tensor_properties: Properties of the shards.

        Raises:
            ArgumentTypeError: An argument has a wrong type.
            ShardingSpecError: The tensor has no such dim, or the dim is given by name.
        """
        check_build_arguments(self, tensor_sizes, tensor_properties)
        ndim = len(tensor_sizes)
        if isinstance(self.dim, str):
            raise ShardingSpecError(
                f"dim {self.dim!r} is a name, and sizes {tuple(tensor_sizes)} have none: "
                "turn it into an index with on_names()"
            )
        if not -ndim <= self.dim < ndim:
            raise ShardingSpecError(f"dim {self.dim} is not a dim of a tensor of size {tuple(tensor_sizes)}")
        dim = self.dim % ndim
        # 5 rows on 4 placements: chunks of 2, 2, 1 and 0 rows, which begin at 0, 2, 4 and 5.
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
    """Size of the first chunks of ``torch.chunk``: the size of the dim over the number of chunks, rounded up.

    Raises:
        ArgumentTypeError: A number is no integer.
        ShardingSpecError: There are no chunks.

    Example:
        >>> get_split_size(5, 4)
        2
    """
    expect_all("get_split_size", "(dim_size, chunks)", (dim_size, chunks), int)
    if chunks < 1:
        raise ShardingSpecError(f"get_split_size: at least one chunk is needed, got {chunks}")
    return (dim_size + chunks - 1) // chunks


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """Size of chunk ``idx`` of a dim: ``split_size``, or the remainder, or 0.

    Args:
        dim_size: Size of the dim.
        split_size: Size of the first chunks, see ``get_split_size``.
        idx: Index of the chunk.

    Raises:
        ArgumentTypeError: A number is no integer.

    Example:
        >>> [get_chunked_dim_size(5, 2, idx) for idx in range(4)]
        [2, 2, 1, 0]
    """
    expect_all("get_chunked_dim_size", "(dim_size, split_size, idx)", (dim_size, split_size, idx), int)
    remaining = dim_size - idx * split_size
    return min(max(remaining, 0), split_size)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """First index and size, along the sharded dim, of the chunk on a global rank.

    Args:
        sharding_dim_size: Global size of the sharded dim.
        world_size: Number of chunks.
        spec: Placements of the chunks.
        rank: Global rank.

    Raises:
        ArgumentTypeError: The spec is no ChunkShardingSpec, or a number no integer.
        ShardingSpecError: The rank holds no chunk.

    Example:
        >>> get_chunk_sharding_params(5, 2, ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), 0)
        (3, 2)
    """
    expect("get_chunk_sharding_params", "spec", spec, ChunkShardingSpec)
    expect("get_chunk_sharding_params", "rank", rank, int)
    split = get_split_size(sharding_dim_size, world_size)
    for index, placement in enumerate(spec.placements):
        if placement.rank() == rank:
            return min(split * index, sharding_dim_size), get_chunked_dim_size(sharding_dim_size, split, index)
    raise ShardingSpecError(f"rank {rank} holds no chunk; the placements are {spec.placements}")
