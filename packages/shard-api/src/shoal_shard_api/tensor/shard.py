"""The shard of a tensor, and how the shards of all ranks make up the tensor: metadata and their checks.

Each rank checks its own shards first; then all ranks receive the errors, or the metadata, of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from shoal_dtensor.internal import format_box, slices_of

from ..arguments import expect, expect_all, expect_plain
from ..errors import ArgumentTypeError, LocalShardError, ShardingSpecError, UnsupportedOpError
from ..ranks.process_groups import agree_on, members, resolve
from ..spec.metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    check_tensor,
    validate_non_overlapping_shards_metadata,
)

# The properties that all shards of a tensor share; their layout is torch.strided, or they were no
# shards.
_COMPARED = ("dtype", "requires_grad", "pin_memory")


@dataclass(slots=True)
class Shard:
    """The local tensor of one shard and its metadata.

    Args:
        tensor: The local tensor, of size ``metadata.shard_sizes``.
        metadata: Offsets and sizes in the global tensor, and the placement.

    Raises:
        ArgumentTypeError: The tensor is no plain tensor, or the metadata no ShardMetadata.
        LocalShardError: Size or device type of the tensor differ from the metadata.

    Example:
        >>> Shard(torch.zeros(2, 3), ShardMetadata([4, 0], [2, 3], "rank:0/cpu")).metadata.box
        ((4, 6), (0, 3))
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        expect_plain("Shard", "tensor", self.tensor)
        expect("Shard", "metadata", self.metadata, ShardMetadata)
        placement = self.metadata.placement
        size = list(self.tensor.shape)
        expected = self.metadata.shard_sizes
        if size != expected:
            raise LocalShardError(
                f"the tensor of {self.metadata} has size {size}, its metadata {expected}"
            )
        if placement is not None and placement.device().type != self.tensor.device.type:
            raise LocalShardError(
                f"the tensor of {self.metadata} is on {self.tensor.device}, its placement is "
                f"{placement}"
            )

    @classmethod
    def from_tensor_and_offsets(
        cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int
    ) -> Shard:
        """The shard on a global rank of a local tensor that begins at ``shard_offsets``, placed on the tensor's device.

        Raises:
            ArgumentTypeError: ``tensor`` is no tensor, or ``rank`` no integer.
            ShardingSpecError: The offsets are no integers, negative, or not one for each dim.
        """
        expect_plain("Shard.from_tensor_and_offsets", "tensor", tensor)
        expect("Shard.from_tensor_and_offsets", "rank", rank, int)
        return cls(
            tensor,
            ShardMetadata(shard_offsets, list(tensor.size()), f"rank:{rank}/{tensor.device}"),
        )


def narrow_tensor_by_index(
    tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """A view of ``sizes`` elements along each dim, beginning at ``offsets``.

    Args:
        tensor: A plain tensor.
        offsets: First index along every dim.
        sizes: Number of elements along every dim.

    Raises:
        ArgumentTypeError: ``tensor`` is no tensor.
        ShardingSpecError: Offsets or sizes are not one integer for each dim, or reach beyond the
            tensor.

    Example:
        >>> narrow_tensor_by_index(torch.arange(6).view(2, 3), [0, 1], [2, 1]).tolist()
        [[1], [4]]
    """
    return narrow_tensor(tensor, ShardMetadata(offsets, sizes))


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """The view of a plain global tensor that is the shard with this metadata.

    Args:
        tensor: A plain tensor of the global size.
        metadata: Offsets and sizes of the shard; its placement is ignored.

    Raises:
        ArgumentTypeError: ``tensor`` is no tensor, or ``metadata`` no ShardMetadata.
        ShardingSpecError: The shard has another number of dims, or reaches beyond the tensor.

    Example:
        >>> narrow_tensor(torch.arange(6), ShardMetadata([2], [3]))
        tensor([2, 3, 4])
    """
    expect("narrow_tensor", "tensor", tensor, torch.Tensor)
    expect("narrow_tensor", "metadata", metadata, ShardMetadata)
    box = metadata.box
    if len(box) != tensor.dim() or any(
        stop > size for (_, stop), size in zip(box, tensor.shape, strict=True)
    ):
        raise ShardingSpecError(
            f"shard {format_box(box)} is not inside a tensor of size {tuple(tensor.shape)}"
        )
    return tensor[slices_of(box)]


def ordered_for(shards: Sequence[Shard], metadata: ShardedTensorMetadata) -> list[torch.Tensor]:
    """The local tensors in the order of the metadata; a LocalShardError unless it places these shards on this rank."""
    by_box = {shard.metadata.box: shard for shard in shards}
    expected = [each.box for each in own_shards(metadata)]
    if len(by_box) != len(shards) or set(by_box) != set(expected):
        wanted = [format_box(box) for box in expected]
        got = [format_box(shard.metadata.box) for shard in shards]
        raise LocalShardError(f"rank {dist.get_rank()} must pass the shards {wanted}, got {got}")
    for shard in shards:
        check_properties(shard, metadata.tensor_properties)
    return [by_box[box].tensor for box in expected]


def check_properties(shard: Shard, properties: TensorProperties) -> None:
    """Check dtype, requires_grad, pinning and contiguity of a shard against the tensor's properties."""
    tensor = shard.tensor
    where = f"shard {format_box(shard.metadata.box)} on {shard.metadata.placement}"
    if not tensor.is_contiguous():
        raise LocalShardError(
            f"{where}: its tensor of size {list(tensor.size())} is not contiguous"
        )
    actual = TensorProperties.create_from_tensor(tensor)
    for name in _COMPARED:
        if getattr(actual, name) != getattr(properties, name):
            raise LocalShardError(
                f"{where}: its {name} is {getattr(actual, name)}, the sharded tensor's is "
                f"{getattr(properties, name)}"
            )


# --- from the shards of every rank to the tensor --------------------------------------------------


def flatten_size(size: Sequence[Any], *, inferred: bool = False) -> tuple[Any, ...]:
    """The sizes passed as ``f(2, 3)`` or as ``f([2, 3])``; where ``inferred``, None is a dim whose size is."""
    dims = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    for dim in (each for each in dims if each is not None):
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise ArgumentTypeError(f"the size must be integers, got {dims}")
        if dim < 0:
            raise ShardingSpecError(f"the size must not be negative, got {dims}")
    if None in dims and not inferred:
        raise ArgumentTypeError(f"the size must be integers, got {dims}: no dim is inferred here")
    return dims


def describe(
    shards: Sequence[Shard], global_size: Sequence[Any], group: dist.ProcessGroup
) -> ShardedTensorMetadata:
    """Metadata of the global tensor, the same on every rank, which call it with their shards."""

    def facts() -> dict[str, Any]:
        size = flatten_size(global_size, inferred=True)
        _check_local(shards, size)
        own = TensorProperties.create_from_tensor(shards[0].tensor) if shards else None
        shared = {f"?{name}": getattr(own, name) for name in _COMPARED if own is not None}
        return {"global size": size, **shared, "~shards": [shard.metadata for shard in shards]}

    reports = agree_on(group, facts)
    size = flatten_size(global_size, inferred=True)
    shared = next((report for report in reports if report["~shards"]), None)
    if shared is None:
        raise ShardingSpecError("no rank has a local shard")
    properties = TensorProperties(**{name: shared[f"?{name}"] for name in _COMPARED})
    per_rank = [list(report["~shards"]) for report in reports]
    if None in size:
        size, per_rank = _concatenated(per_rank, size, members(group))
    metadata = [shard for own in per_rank for shard in own]
    return checked_metadata(ShardedTensorMetadata(metadata, torch.Size(size), properties), group)


def _check_local(shards: Any, size: tuple[int | None, ...]) -> None:
    rank = dist.get_rank()
    if size.count(None) > 1:
        raise ShardingSpecError(f"at most one dim of the global size may be None, got {size}")
    expect_all("init_from_local_shards", "local_shards", shards, Shard)
    if None in size and len(shards) != 1:
        raise LocalShardError(
            f"a size with a dim to infer, {size}, needs one shard on every rank; got {len(shards)}"
        )
    for shard in shards:
        if shard.metadata.rank != rank:
            raise LocalShardError(
                f"a local shard is placed on {shard.metadata.placement}, but this is rank {rank}"
            )
        check_properties(shard, TensorProperties.create_from_tensor(shards[0].tensor))


def _concatenated(
    per_rank: list[list[ShardMetadata]], size: tuple[int | None, ...], ranks: Sequence[int]
) -> tuple[tuple[int, ...], list[list[ShardMetadata]]]:
    """The size that results, and metadata of one shard per rank, concatenated along the dim to infer."""
    at = 0
    metadata = []
    for rank, (shard,) in zip(ranks, per_rank, strict=True):
        if len(shard.shard_sizes) != len(size):
            raise ShardingSpecError(
                f"the shard on rank {rank} has {len(shard.shard_sizes)} dims, the size {size}"
            )
        offsets = [at if n is None else 0 for n in size]
        at += shard.shard_sizes[size.index(None)]
        metadata.append([ShardMetadata(offsets, shard.shard_sizes, shard.placement)])
    return tuple(at if n is None else n for n in size), metadata


def checked_metadata(
    metadata: ShardedTensorMetadata, group: dist.ProcessGroup
) -> ShardedTensorMetadata:
    """The metadata of dense shards that are on ranks of the group and cover its size; else a ShardingSpecError."""
    # a spec of a user's own returns anything
    expect("ShardedTensor", "metadata", metadata, ShardedTensorMetadata)
    ranks = members(group)
    for index, shard in enumerate(metadata.shards_metadata):
        if shard.rank not in ranks:
            raise ShardingSpecError(
                f"shard {index} on {shard.placement}: global rank {shard.rank} is not among the "
                f"group's, {list(ranks)}"
            )
    validate_non_overlapping_shards_metadata(metadata.shards_metadata)
    check_tensor(metadata.shards_metadata, metadata.size)
    properties = metadata.tensor_properties
    if properties.layout != torch.strided or properties.memory_format != torch.contiguous_format:
        raise ShardingSpecError(
            f"shards are torch.strided and contiguous_format, not {properties.layout} and "
            f"{properties.memory_format}"
        )
    return replace(metadata, size=torch.Size(metadata.size))


def empty_local_tensors(metadata: ShardedTensorMetadata) -> list[torch.Tensor]:
    """Uninitialised local tensors of this rank's shards; one empty tensor if it has none, for its node in autograd."""
    properties = metadata.tensor_properties
    sizes: list[tuple[list[int], Any]] = [
        (each.shard_sizes, device_of(each)) for each in own_shards(metadata)
    ]
    # this rank's current device of that type
    current = device_of(metadata.shards_metadata[0]).type
    options: dict[str, Any] = {"dtype": properties.dtype, "pin_memory": properties.pin_memory}
    new = (
        torch.empty(size, device=device, **options) for size, device in sizes or [([0], current)]
    )
    return [local.requires_grad_(properties.requires_grad) for local in new]


def on_placements(
    local_tensors: Sequence[torch.Tensor], metadata: ShardedTensorMetadata
) -> list[torch.Tensor]:
    """This rank's local tensors on the devices of the metadata's placements; copied only to another device."""
    devices = [device_of(each) for each in own_shards(metadata)] or [local_tensors[0].device]
    return [local.to(device) for local, device in zip(local_tensors, devices, strict=True)]


def own_shards(metadata: ShardedTensorMetadata) -> list[ShardMetadata]:
    """The shards that are placed on this rank."""
    rank = dist.get_rank()
    return [each for each in metadata.shards_metadata if each.rank == rank]


def device_of(shard: ShardMetadata) -> torch.device:
    """Device of a shard that has a placement."""
    assert shard.placement is not None, "checked by ShardMetadata.rank"
    return shard.placement.device()


def group_of(process_group: dist.ProcessGroup | None, init_rrefs: bool) -> dist.ProcessGroup:
    """The group of a new tensor; UnsupportedOpError for ``init_rrefs=True``, remote references (docs/adr/0010)."""
    if init_rrefs:
        raise UnsupportedOpError(
            "init_rrefs: remote references over RPC are not supported; use gather or reshard"
        )
    return resolve(process_group)
