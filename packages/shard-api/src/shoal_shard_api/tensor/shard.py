"""`Shard`, and the metadata of a tensor from the shards of all ranks.

Each rank checks its own shards first. Then all ranks receive the errors, or the metadata, of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from shoal_dtensor.internal import format_box, slices_of
from shoal_mesh.internal import require, require_each

from ..arguments import require_plain
from ..errors import ArgumentTypeError, LocalShardError, ShardingSpecError, UnsupportedOpError
from ..ranks.process_groups import Fact, agree_on, members, resolve
from ..spec.metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    check_tensor,
    is_inside,
    validate_non_overlapping_shards_metadata,
)

# The properties that all shards of a tensor share. Every Shard is strided, so the layout is not
# among them.
_COMPARED = ("dtype", "requires_grad", "pin_memory")


@dataclass(slots=True)
class Shard:
    """The local tensor of one shard and its metadata.

    Args:
        tensor: The local tensor, of size ``metadata.shard_sizes``.
        metadata: Offsets and sizes in the global tensor, and the placement.

    Raises:
        ArgumentTypeError: The tensor is not a plain tensor, or the metadata not a ShardMetadata.
        LocalShardError: Size or device type of the tensor differ from the metadata.

    Example:
        >>> Shard(torch.zeros(2, 3), ShardMetadata([4, 0], [2, 3], "rank:0/cpu")).metadata.box
        ((4, 6), (0, 3))
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        require_plain(self.tensor, "Shard: tensor is a plain strided tensor")
        require(
            self.metadata, ShardMetadata, "Shard: metadata is a ShardMetadata", ArgumentTypeError
        )
        placement = self.metadata.placement
        size = list(self.tensor.shape)
        expected = self.metadata.shard_sizes
        if size != expected:
            raise LocalShardError(
                f"a shard must have the size of its metadata: the tensor has size {size}, but its "
                f"metadata says {expected} ({self.metadata})"
            )
        device = self.tensor.device
        if placement is not None and placement.device().type != device.type:
            raise LocalShardError(
                f"a shard must be on the device of its placement: the tensor of {self.metadata} "
                f"is on {device}, but its placement is {placement}"
            )

    @classmethod
    def from_tensor_and_offsets(
        cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int
    ) -> Shard:
        """Make the shard of a local tensor that begins at ``shard_offsets``, on its own device.

        Args:
            tensor: The local tensor.
            shard_offsets: First index in the global tensor along every dim.
            rank: The global rank that holds the tensor.

        Raises:
            ArgumentTypeError: ``tensor`` is not a tensor, or ``rank`` not an integer.
            ShardingSpecError: The offsets are not one integer >= 0 for each dim.
        """
        require_plain(tensor, "Shard.from_tensor_and_offsets: tensor is a plain strided tensor")
        require(
            rank,
            int,
            "Shard.from_tensor_and_offsets: rank is an int",
            ArgumentTypeError,
            without=bool,
        )
        placement = f"rank:{rank}/{tensor.device}"
        return cls(tensor, ShardMetadata(shard_offsets, list(tensor.size()), placement))


def narrow_tensor_by_index(
    tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Return a view of ``sizes`` elements along each dim, beginning at ``offsets``.

    Args:
        tensor: A plain tensor.
        offsets: First index along every dim.
        sizes: Number of elements along every dim.

    Raises:
        ArgumentTypeError: ``tensor`` is not a tensor.
        ShardingSpecError: Offsets or sizes are not one integer for each dim, or reach beyond the
            tensor.

    Example:
        >>> narrow_tensor_by_index(torch.arange(6).view(2, 3), [0, 1], [2, 1]).tolist()
        [[1], [4]]
    """
    return narrow_tensor(tensor, ShardMetadata(offsets, sizes))


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """Return the view of a plain global tensor that is the shard with this metadata.

    Args:
        tensor: A plain tensor of the global size.
        metadata: Offsets and sizes of the shard; its placement is ignored.

    Raises:
        ArgumentTypeError: ``tensor`` is not a tensor, or ``metadata`` not a ShardMetadata.
        ShardingSpecError: The shard has another number of dims, or reaches beyond the tensor.

    Example:
        >>> narrow_tensor(torch.arange(6), ShardMetadata([2], [3]))
        tensor([2, 3, 4])
    """
    require(tensor, torch.Tensor, "narrow_tensor: tensor is a Tensor", ArgumentTypeError)
    require(
        metadata, ShardMetadata, "narrow_tensor: metadata is a ShardMetadata", ArgumentTypeError
    )
    box = metadata.box
    same_ndim = len(box) == tensor.dim()
    if not same_ndim or not is_inside(box, tensor.shape):
        raise ShardingSpecError(
            f"shard {format_box(box)} is not inside a tensor of size {tuple(tensor.shape)}"
        )
    return tensor[slices_of(box)]


def sort_local_tensors(
    shards: Sequence[Shard], metadata: ShardedTensorMetadata
) -> list[torch.Tensor]:
    """Return the local tensors in the order of the metadata.

    Raises:
        LocalShardError: The metadata does not place exactly these shards on this rank.
    """
    by_box = {shard.metadata.box: shard for shard in shards}
    expected = [shard.box for shard in own_shards(metadata)]
    has_repeated_box = len(by_box) != len(shards)
    if has_repeated_box or set(by_box) != set(expected):
        allowed = [format_box(box) for box in expected]
        got = [format_box(shard.metadata.box) for shard in shards]
        raise LocalShardError(f"rank {dist.get_rank()} must pass the shards {allowed}, got {got}")
    for shard in shards:
        check_properties(shard, metadata.tensor_properties)
    return [by_box[box].tensor for box in expected]


def check_properties(shard: Shard, properties: TensorProperties) -> None:
    """Raise LocalShardError unless a shard is contiguous and has the properties of the tensor."""
    tensor = shard.tensor
    metadata = shard.metadata
    name_of_shard = f"shard {format_box(metadata.box)} on {metadata.placement}"
    if not tensor.is_contiguous():
        size = list(tensor.size())
        raise LocalShardError(f"{name_of_shard}: its tensor of size {size} is not contiguous")
    actual = TensorProperties.create_from_tensor(tensor)
    for name in _COMPARED:
        value = getattr(actual, name)
        expected = getattr(properties, name)
        if value != expected:
            raise LocalShardError(
                f"{name_of_shard}: its {name} is {value}, but the sharded tensor's is {expected}"
            )


# --- from the shards of every rank to the tensor --------------------------------------------------


def flatten_size(size: Sequence[Any], *, inferred: bool = False) -> tuple[Any, ...]:
    """Return the size that was passed as ``f(2, 3)`` or as ``f([2, 3])``.

    Args:
        size: The positional arguments.
        inferred: Allow None, for a dim whose size the shards determine.

    Raises:
        ArgumentTypeError: A size is not an integer.
        ShardingSpecError: A size is negative.
    """
    dims = tuple(size)
    if len(dims) == 1 and isinstance(dims[0], Sequence):
        dims = tuple(dims[0])
    for dim in dims:
        if dim is None:
            continue
        is_integer = isinstance(dim, int) and not isinstance(dim, bool)
        if not is_integer:
            raise ArgumentTypeError(f"the size must be integers, got {dims}")
        if dim < 0:
            raise ShardingSpecError(f"the size must not be negative, got {dims}")
    if None in dims and not inferred:
        raise ArgumentTypeError(
            f"the size must be integers, got {dims}: this call does not infer dims"
        )
    return dims


def describe(
    shards: Sequence[Shard], global_size: Sequence[Any], group: dist.ProcessGroup
) -> ShardedTensorMetadata:
    """Return the metadata of the global tensor; every rank calls it with its own shards.

    All ranks return the same metadata, or raise the same error.
    """

    def facts() -> dict[str, Any]:
        size = flatten_size(global_size, inferred=True)
        _check_local(shards, size)
        metadata = [shard.metadata for shard in shards]
        found: dict[str, Any] = {"global size": size, "shards": Fact(metadata, compare=False)}
        if shards:
            properties = TensorProperties.create_from_tensor(shards[0].tensor)
            for name in _COMPARED:
                # a rank without shards has none of these properties
                found[name] = Fact(getattr(properties, name), required=False)
        return found

    reports = agree_on(group, facts)
    size = flatten_size(global_size, inferred=True)
    with_shards = [report for report in reports if report["shards"]]
    if not with_shards:
        raise ShardingSpecError("at least one rank must have a local shard")
    first = with_shards[0]
    properties = TensorProperties(**{name: first[name] for name in _COMPARED})
    shards_by_rank = [list(report["shards"]) for report in reports]
    if None in size:
        size, shards_by_rank = _concatenate(shards_by_rank, size, members(group))
    shards_of_all = [shard for shards_of_rank in shards_by_rank for shard in shards_of_rank]
    metadata = ShardedTensorMetadata(shards_of_all, torch.Size(size), properties)
    return checked_metadata(metadata, group)


def _check_local(shards: Any, size: tuple[int | None, ...]) -> None:
    rank = dist.get_rank()
    if size.count(None) > 1:
        raise ShardingSpecError(f"at most one dim of the global size may be None, got {size}")
    require_each(
        shards,
        Shard,
        "init_from_local_shards: local_shards is a sequence of Shard",
        ArgumentTypeError,
    )
    if None in size and len(shards) != 1:
        raise LocalShardError(
            f"a size with None, {size}, needs one shard on every rank; got {len(shards)}"
        )
    for shard in shards:
        placement = shard.metadata.placement
        if shard.metadata.rank != rank:
            raise LocalShardError(
                f"a local shard is placed on {placement}, but this is rank {rank}"
            )
        properties = TensorProperties.create_from_tensor(shards[0].tensor)
        check_properties(shard, properties)


def _concatenate(
    shards_by_rank: list[list[ShardMetadata]], size: tuple[int | None, ...], ranks: Sequence[int]
) -> tuple[tuple[int, ...], list[list[ShardMetadata]]]:
    """Concatenate one shard per rank along the dim of size None; return size and metadata."""
    dim = size.index(None)
    end = 0
    metadata = []
    for rank, (shard,) in zip(ranks, shards_by_rank, strict=True):
        sizes = shard.shard_sizes
        if len(sizes) != len(size):
            raise ShardingSpecError(
                f"the shard on rank {rank} has {len(sizes)} dims, the size {size}"
            )
        offsets = [0] * len(size)
        offsets[dim] = end
        end += sizes[dim]
        metadata.append([ShardMetadata(offsets, sizes, shard.placement)])
    global_size = tuple([end if length is None else length for length in size])
    return global_size, metadata


def checked_metadata(
    metadata: ShardedTensorMetadata, group: dist.ProcessGroup
) -> ShardedTensorMetadata:
    """Return metadata that is valid for a tensor on the ranks of a group; no communication.

    Raises:
        ArgumentTypeError: ``metadata`` is something else; a spec of the user's may return anything.
        ShardingSpecError: A shard is on no rank of the group, the shards overlap or do not cover
            the size, or they are not dense.
    """
    require(
        metadata,
        ShardedTensorMetadata,
        "ShardedTensor: metadata is a ShardedTensorMetadata",
        ArgumentTypeError,
    )
    ranks = members(group)
    for index, shard in enumerate(metadata.shards_metadata):
        if shard.rank not in ranks:
            raise ShardingSpecError(
                f"shard {index} on {shard.placement}: global rank {shard.rank} is not among the "
                f"group's, {list(ranks)}"
            )
    validate_non_overlapping_shards_metadata(metadata.shards_metadata)
    check_tensor(metadata.shards_metadata, metadata.size)
    layout = metadata.tensor_properties.layout
    memory_format = metadata.tensor_properties.memory_format
    if layout != torch.strided or memory_format != torch.contiguous_format:
        raise ShardingSpecError(
            f"shards must be torch.strided and contiguous_format, got {layout} and {memory_format}"
        )
    return replace(metadata, size=torch.Size(metadata.size))


def empty_local_tensors(metadata: ShardedTensorMetadata) -> list[torch.Tensor]:
    """Allocate the local tensors of this rank's shards, uninitialized.

    A rank without shards has one empty tensor, so that it has a node in the autograd graph.
    """
    properties = metadata.tensor_properties
    options: dict[str, Any] = {
        "dtype": properties.dtype,
        "pin_memory": properties.pin_memory,
        "requires_grad": properties.requires_grad,
    }
    shards = own_shards(metadata)
    if not shards:
        # This rank's current device of the type that the shards are on.
        device_type = device_of(metadata.shards_metadata[0]).type
        return [torch.empty([0], device=device_type, **options)]
    return [torch.empty(shard.shard_sizes, device=device_of(shard), **options) for shard in shards]


def move_to_placements(
    local_tensors: Sequence[torch.Tensor], metadata: ShardedTensorMetadata
) -> list[torch.Tensor]:
    """Move this rank's local tensors to the devices of the metadata's placements."""
    shards = own_shards(metadata)
    if not shards:
        return list(local_tensors)
    pairs = zip(local_tensors, shards, strict=True)
    return [local.to(device_of(shard)) for local, shard in pairs]


def own_shards(metadata: ShardedTensorMetadata) -> list[ShardMetadata]:
    """Return the shards that are placed on this rank."""
    rank = dist.get_rank()
    return [shard for shard in metadata.shards_metadata if shard.rank == rank]


def device_of(shard: ShardMetadata) -> torch.device:
    """Return the device of a shard that has a placement."""
    assert shard.placement is not None, "checked by ShardMetadata.rank"
    return shard.placement.device()


def group_of(process_group: dist.ProcessGroup | None, init_rrefs: bool) -> dist.ProcessGroup:
    """Return the group of a new tensor.

    Raises:
        UnsupportedOpError: ``init_rrefs`` is True (docs/adr/0010).
    """
    if init_rrefs:
        raise UnsupportedOpError(
            "init_rrefs: remote references over RPC are not supported; use gather or reshard"
        )
    return resolve(process_group)
