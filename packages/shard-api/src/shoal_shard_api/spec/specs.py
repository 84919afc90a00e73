"""Sharding specs: the abstract class, chunks of one dim, lists of shards, and the simplest spec.

A spec maps a global size to shards, and does not hold data. ``ShardingSpec.shard`` needs the class
ShardedTensor, whose module imports this one. So tensor/sharded_tensor.py sets
``ShardingSpec._scatter`` to the constructor that it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from shoal_dtensor.internal import Box, shape_of, volume
from shoal_mesh.internal import require, require_each

from .._torch import RemoteDevice
from ..errors import ArgumentTypeError, ShardingSpecError
from .metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    check_tensor,
    parse_placement,
    validate_non_overlapping_shards_metadata,
)


class PlacementSpec(ABC):  # noqa: B024  # a marker to derive from, as in torch's API
    """Base class of the placements of an entity.

    Example:
        >>> isinstance(DevicePlacementSpec("rank:0/cpu"), PlacementSpec)
        True
    """


@dataclass(frozen=True)
class DevicePlacementSpec(PlacementSpec):
    """The placement of an entity on one device of one rank.

    Args:
        device: "rank:1/cuda:1", or a parsed placement.

    Raises:
        ShardingSpecError: The device cannot be parsed.

    Example:
        >>> DevicePlacementSpec("rank:1/cpu").device.rank()
        1
    """

    device: RemoteDevice

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", parse_placement(self.device))


class ShardingSpec(ABC):
    """The mapping of a global size to shards and ranks; a subclass defines ``build_metadata``.

    Example:
        >>> class OnRankZero(ShardingSpec):
        ...     def build_metadata(self, tensor_sizes, tensor_properties):
        ...         shard = ShardMetadata([0] * len(tensor_sizes), tensor_sizes, "rank:0/cpu")
        ...         return ShardedTensorMetadata([shard], tensor_sizes, tensor_properties)
        >>> OnRankZero().shard(torch.arange(3)).full_tensor()
        tensor([0, 1, 2])
    """

    _scatter: ClassVar[Callable[..., Any]]

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """Return all shards of a tensor of this size; the same on every rank.

        Args:
            tensor_sizes: Global size.
            tensor_properties: Properties of the shards.

        Raises:
            ShardingSpecError: The spec does not fit a tensor of this size.
        """

    def shard(
        self, tensor: torch.Tensor, src_rank: int = 0, process_group: ProcessGroup | None = None
    ) -> Any:
        """Shard a plain tensor of ``src_rank`` by this spec; all ranks call it.

        Args:
            tensor: Global tensor, of the same size and dtype on every rank; the data of
                ``src_rank`` are used.
            src_rank: Rank in ``process_group`` (a global rank if no group is given).
            process_group: Group of the ranks named in the spec; None is the default group.

        Raises:
            ShardingSpecError: The spec does not fit the tensor or the group.
            ProcessGroupError: ``src_rank`` is not a rank of the group, or this rank is not in it.
        """
        return ShardingSpec._scatter(self, tensor, src_rank, process_group)


def _check_build_arguments(spec: ShardingSpec, tensor_sizes: Any, tensor_properties: Any) -> None:
    call = f"{type(spec).__name__}.build_metadata"
    require_each(
        tensor_sizes,
        int,
        f"{call}: tensor_sizes is a sequence of ints",
        ArgumentTypeError,
        without=bool,
    )
    require(
        tensor_properties,
        TensorProperties,
        f"{call}: tensor_properties is a TensorProperties",
        ArgumentTypeError,
    )


@dataclass(frozen=True, eq=True)
class ChunkShardingSpec(ShardingSpec):
    """A spec that shards one tensor dim into chunks of the sizes of ``torch.chunk``.

    Every placement has one chunk; the last chunks may be smaller or empty. Placements may be in any
    order, and a rank may hold several chunks.

    Args:
        dim: Tensor dim to shard; negative counts from the end. A string is the name of a dim, which
            ``on_names`` turns into an index (torch's tensors have no names any more).
        placements: Placement of each chunk: "rank:1/cuda:1" (a global rank and its device), or a
            parsed one.

    Raises:
        ShardingSpecError: ``dim`` is neither an integer nor a string, there is no placement, or one
            cannot be parsed.

    Example:
        >>> spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
        >>> metadata = spec.build_metadata(torch.Size([5, 2]), TensorProperties())
        >>> [shard.shard_sizes for shard in metadata.shards_metadata]
        [[3, 2], [2, 2]]
    """

    ShardingDim = int | str
    dim: int | str
    placements: list[RemoteDevice]

    def __init__(self, dim: int | str, placements: Sequence[str | RemoteDevice]) -> None:
        require(
            dim,
            int | str,
            "ChunkShardingSpec: dim is an int or a str",
            ShardingSpecError,
            without=bool,
        )
        require_each(
            placements,
            str | RemoteDevice,
            "ChunkShardingSpec: placements is a sequence of strings or RemoteDevice",
            ShardingSpecError,
        )
        if not placements:
            raise ShardingSpecError("ChunkShardingSpec needs at least one placement, got none")
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "placements", list(map(parse_placement, placements)))

    def __hash__(self) -> int:
        return hash((self.dim, tuple(self.placements)))

    def on_names(self, names: Sequence[str | None]) -> ChunkShardingSpec:
        """Replace the name of the dim by its index in ``names``.

        Args:
            names: Names of all dims of a tensor, None for a dim without one.

        Raises:
            ArgumentTypeError: The names are not a sequence of strings or None.
            ShardingSpecError: No dim has that name; lists the names.

        Example:
            >>> ChunkShardingSpec("rows", ["rank:0/cpu"]).on_names(["batch", "rows"]).dim
            1
        """
        require_each(
            names, str | None, "on_names: names is a sequence of strings or None", ArgumentTypeError
        )
        if not isinstance(self.dim, str):
            return self
        if self.dim not in names:
            raise ShardingSpecError(
                f"the tensor does not have a dim named {self.dim!r}; its dims are named "
                f"{tuple(names)}"
            )
        return ChunkShardingSpec(list(names).index(self.dim), self.placements)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """Return one shard per placement; an empty shard begins at the end of the dim.

        Raises:
            ArgumentTypeError: An argument has a wrong type.
            ShardingSpecError: The tensor has no such dim, or the dim is given by name.
        """
        _check_build_arguments(self, tensor_sizes, tensor_properties)
        ndim = len(tensor_sizes)
        if isinstance(self.dim, str):
            raise ShardingSpecError(
                f"dim {self.dim!r} is a name, but the sizes {tuple(tensor_sizes)} do not have "
                "names: convert it to an index with on_names()"
            )
        if not -ndim <= self.dim < ndim:
            raise ShardingSpecError(
                f"dim {self.dim} is not a dim of a tensor of size {tuple(tensor_sizes)}"
            )
        dim = self.dim % ndim
        # Example: 5 rows on 4 placements -> chunks of 2, 2, 1 and 0 rows from 0, 2, 4 and 5 on.
        total = tensor_sizes[dim]
        split = get_split_size(total, len(self.placements))
        shards = []
        for index, placement in enumerate(self.placements):
            offsets = [0] * ndim
            sizes = list(tensor_sizes)
            offsets[dim] = min(split * index, total)
            sizes[dim] = get_chunked_dim_size(total, split, index)
            shards.append(ShardMetadata(offsets, sizes, placement))
        return ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)


def get_split_size(dim_size: int, chunks: int) -> int:
    """Return the size of the first chunks of ``torch.chunk``: ``dim_size / chunks``, rounded up.

    Args:
        dim_size: number of elements, 0 or more.
        chunks: number of chunks, at least 1.

    Raises:
        ArgumentTypeError: A number is not an integer.
        ShardingSpecError: There are no chunks.

    Example:
        >>> get_split_size(5, 4)
        2
    """
    require_each(
        (dim_size, chunks),
        int,
        "get_split_size: dim_size and chunks are ints",
        ArgumentTypeError,
        without=bool,
    )
    if chunks < 1:
        raise ShardingSpecError(f"get_split_size: chunks must be at least 1, got {chunks}")
    return (dim_size + chunks - 1) // chunks


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """Return the size of chunk ``idx`` of a dim: ``split_size``, the remainder, or 0.

    Args:
        dim_size: Size of the dim.
        split_size: Size of the first chunks, see ``get_split_size``.
        idx: Index of the chunk.

    Raises:
        ArgumentTypeError: A number is not an integer.

    Example:
        >>> [get_chunked_dim_size(5, 2, idx) for idx in range(4)]
        [2, 2, 1, 0]
    """
    numbers = (dim_size, split_size, idx)
    require_each(
        numbers,
        int,
        "get_chunked_dim_size: dim_size, split_size and idx are ints",
        ArgumentTypeError,
        without=bool,
    )
    # Example: a dim of 5 in chunks of 2 -> 1 remains for chunk 2, and -1 for chunk 3.
    remaining = dim_size - idx * split_size
    return min(max(remaining, 0), split_size)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """Return the first index and the size, along the sharded dim, of the chunk on a global rank.

    Args:
        sharding_dim_size: Global size of the sharded dim.
        world_size: Number of chunks.
        spec: Placements of the chunks.
        rank: Global rank.

    Raises:
        ArgumentTypeError: The spec is not a ChunkShardingSpec, or a number is not an integer.
        ShardingSpecError: The rank holds no chunk.

    Example:
        >>> get_chunk_sharding_params(5, 2, ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), 0)
        (3, 2)
    """
    require(
        spec,
        ChunkShardingSpec,
        "get_chunk_sharding_params: spec is a ChunkShardingSpec",
        ArgumentTypeError,
    )
    require(rank, int, "get_chunk_sharding_params: rank is an int", ArgumentTypeError, without=bool)
    split = get_split_size(sharding_dim_size, world_size)
    for index, placement in enumerate(spec.placements):
        if placement.rank() == rank:
            offset = min(split * index, sharding_dim_size)
            return offset, get_chunked_dim_size(sharding_dim_size, split, index)
    raise ShardingSpecError(
        f"rank {rank} does not hold a chunk; the placements are {spec.placements}"
    )


@dataclass(frozen=True, eq=True)
class EnumerableShardingSpec(ShardingSpec):
    """A spec of any shards that do not overlap; a rank may hold several of them, or none.

    Args:
        shards: Metadata of all shards of a tensor.

    Raises:
        ShardingSpecError: There are no shards, an entry is not a ShardMetadata, shards overlap
            (both are named), or shards differ in the number of dims.

    Example:
        >>> first = ShardMetadata([0, 0], [1, 4], "rank:0/cpu")
        >>> second = ShardMetadata([1, 0], [3, 4], "rank:1/cpu")
        >>> spec = EnumerableShardingSpec([first, second])
        >>> len(spec.build_metadata(torch.Size([4, 4]), TensorProperties()).shards_metadata)
        2
    """

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        require_each(
            self.shards,
            ShardMetadata,
            "EnumerableShardingSpec: shards is a sequence of ShardMetadata",
            ShardingSpecError,
        )
        if not self.shards:
            raise ShardingSpecError("EnumerableShardingSpec needs at least one shard, got none")
        validate_non_overlapping_shards_metadata(self.shards)
        object.__setattr__(self, "shards", list(self.shards))

    def __hash__(self) -> int:
        return hash(tuple(self.shards))

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """Return the shards as given, if they cover a tensor of this size exactly.

        Raises:
            ArgumentTypeError: An argument has a wrong type.
            ShardingSpecError: The shards do not cover the tensor exactly. The message names the
                shard that reaches beyond the size, or the elements that are in no shard.
        """
        _check_build_arguments(self, tensor_sizes, tensor_properties)
        check_tensor(self.shards, tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), torch.Size(tensor_sizes), tensor_properties)


def _infer_sharding_spec_from_shards_metadata(
    shards_metadata: Sequence[ShardMetadata],
) -> ShardingSpec:
    """Return a ChunkShardingSpec with these shards, in any order, or else one that lists them."""
    require_each(
        shards_metadata,
        ShardMetadata,
        "_infer_sharding_spec_from_shards_metadata: shards_metadata is a sequence of ShardMetadata",
        ArgumentTypeError,
    )
    shards = list(shards_metadata)
    return _as_chunks(shards) or EnumerableShardingSpec(shards)


def _as_chunks(shards: Sequence[ShardMetadata]) -> ChunkShardingSpec | None:
    """Return the ChunkShardingSpec with these shards; None if there is none."""
    placements = [shard.placement for shard in shards]
    ndim = len(shards[0].shard_sizes) if shards else 0
    has_one_ndim = all(len(shard.shard_sizes) == ndim for shard in shards)
    if not ndim or None in placements or not has_one_ndim:
        return None
    size = _size_of_filled(shards, ndim)

    def is_sharded(dim: int) -> bool:
        return any(shard.shard_sizes[dim] != size[dim] for shard in shards)

    sharded_dims = [dim for dim in range(ndim) if is_sharded(dim)]
    if len(sharded_dims) > 1:
        return None
    # Example: shards of (3, 2) and (2, 2) in a tensor of (5, 2) -> dim 0.
    dim = sharded_dims[0] if sharded_dims else 0

    def order(shard: ShardMetadata) -> tuple[bool, int]:
        # Empty shards come last, as the empty chunks of torch.chunk do.
        return shard.shard_sizes[dim] == 0, shard.shard_offsets[dim]

    ordered = sorted(shards, key=order)
    spec = ChunkShardingSpec(dim, [shard.placement for shard in ordered if shard.placement])
    metadata = spec.build_metadata(torch.Size(size), TensorProperties())
    for chunk, shard in zip(metadata.shards_metadata, ordered, strict=True):
        is_empty = shard.shard_sizes[dim] == 0
        if chunk.shard_sizes != shard.shard_sizes:
            return None
        if chunk.box != shard.box and not is_empty:
            return None
    return spec


def _size_of_filled(shards: Sequence[ShardMetadata], ndim: int) -> list[int]:
    """Return the size that the shards with elements reach along every dim.

    Empty shards are ignored, because torch gives them offsets after the end of the dim.
    """
    size = [0] * ndim
    for shard in shards:
        for dim, (start, stop) in enumerate(shard.box):
            if start < stop:
                size[dim] = max(size[dim], stop)
    return size


def spec_of(layout: Sequence[tuple[int, Box]], devices: dict[int, RemoteDevice]) -> ShardingSpec:
    """Return the simplest spec with a layout.

    Args:
        layout: Global rank and box of every shard, at most one shard per rank.
        devices: The placement of every global rank.
    """
    shards = []
    for rank, box in layout:
        offsets = [start for start, _ in box]
        shards.append(ShardMetadata(offsets, shape_of(box), devices[rank]))
    chunks = _as_chunks(shards)
    if chunks is not None:
        return chunks
    # An EnumerableShardingSpec has no empty shards, unless the tensor has no elements at all.
    filled = [shard for shard in shards if volume(shard.box) > 0]
    return EnumerableShardingSpec(filled or shards[:1])
