"""From the local shards of every rank to the metadata of the global tensor: checks, and one exchange of objects.

Each rank checks its own shards first; then all ranks receive the errors, or the metadata, of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..arguments import expect, expect_all
from ..errors import ArgumentTypeError, LocalShardError, RankMismatchError, ShardingSpecError, UnsupportedOpError
from ..ranks.process_groups import agree_on, members
from ..spec.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from ..spec.sharding_spec import check_tensor, validate_non_overlapping_shards_metadata
from .shard import Shard, check_properties


def flatten_size(size: Sequence[Any]) -> tuple[int | None, ...]:
    """The sizes passed as ``f(2, 3)`` or as ``f([2, 3])``; None is a dim whose size is inferred.

    Raises:
        ArgumentTypeError: An entry is neither an integer nor None.
        ShardingSpecError: An entry is negative.
    """
    dims = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    for dim in dims:
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            raise ArgumentTypeError(f"the size must be integers, got {dims}")
        if dim is not None and dim < 0:
            raise ShardingSpecError(f"the size must not be negative, got {dims}")
    return dims


def known_size(size: Sequence[Any]) -> torch.Size:
    """As ``flatten_size``, where no dim may be None."""
    dims = flatten_size(size)
    if None in dims:
        raise ArgumentTypeError(f"the size must be integers, got {dims}: no dim is inferred here")
    return torch.Size([dim for dim in dims if dim is not None])


def describe(
    shards: Sequence[Shard], global_size: Sequence[Any], group: dist.ProcessGroup
) -> tuple[ShardedTensorMetadata, list[Shard]]:
    """Metadata of the global tensor, the same on every rank, and this rank's shards in its order; all ranks call it.

    Args:
        shards: This rank's shards; may be empty.
        global_size: As for ``flatten_size``.  One dim may be None if every rank has one shard: the shards are then
            concatenated along it in the order of the ranks, and their offsets are ignored.
        group: The ranks that hold the tensor.

    Raises:
        ArgumentTypeError: The shards are no sequence of Shards, or the size is no sequence of integers.
        LocalShardError: Local shards differ among themselves, or are placed on another rank.
        RankMismatchError: The size, or dtype, layout, requires_grad or pinning, differs between ranks.
        ShardingSpecError: The shards overlap, leave a gap, or reach beyond the size.
    """
    rank = dist.get_rank()

    def facts() -> dict[str, Any]:
        size = flatten_size(global_size)
        _check_local(shards, size, rank)
        return {
            "global size": size,
            "~properties": TensorProperties.create_from_tensor(shards[0].tensor) if shards else None,
            "~shards": [shard.metadata for shard in shards],
        }

    reports = agree_on(group, facts)
    size, holders = flatten_size(global_size), members(group)
    properties = _common_properties([report["~properties"] for report in reports], holders)
    per_rank = [list(report["~shards"]) for report in reports]
    local = list(shards)
    if None in size:
        size, per_rank = _concatenated(per_rank, size, holders)
        local = [Shard(shards[0].tensor, per_rank[holders.index(rank)][0])]
    metadata = [shard for own in per_rank for shard in own]
    full_size = torch.Size([n for n in size if n is not None])
    validate_non_overlapping_shards_metadata(metadata)
    check_tensor(metadata, full_size)
    return ShardedTensorMetadata(metadata, full_size, properties), local


def _check_local(shards: Any, size: tuple[int | None, ...], rank: int) -> None:
    """Raise what is wrong with the arguments of this rank."""
    if size.count(None) > 1:
        raise ShardingSpecError(f"at most one dim of the global size may be None, got {size}")
    expect_all("init_from_local_shards", "local_shards", shards, Shard)
    if None in size and len(shards) != 1:
        raise LocalShardError(f"a size with a dim to infer, {size}, needs one shard on every rank; got {len(shards)}")
    for shard in shards:
        if shard.metadata.rank != rank:
            raise LocalShardError(f"a local shard is placed on {shard.metadata.placement}, but this is rank {rank}")
        check_properties(shard, TensorProperties.create_from_tensor(shards[0].tensor))


def _common_properties(per_rank: Sequence[TensorProperties | None], ranks: Sequence[int]) -> TensorProperties:
    given = [(rank, each) for rank, each in zip(ranks, per_rank, strict=True) if each is not None]
    if not given:
        raise ShardingSpecError("no rank has a local shard")
    first_rank, first = given[0]
    for rank, each in given:
        for name in ("dtype", "layout", "requires_grad", "pin_memory"):
            if getattr(first, name) != getattr(each, name):
                raise RankMismatchError(
                    f"{name}={getattr(first, name)} of the shards on rank: {first_rank} does not match with "
                    f"{name}={getattr(each, name)} of the shards on rank: {rank}"
                )
    return first


def _concatenated(
    per_rank: list[list[ShardMetadata]], size: tuple[int | None, ...], ranks: Sequence[int]
) -> tuple[tuple[int | None, ...], list[list[ShardMetadata]]]:
    """Metadata of one shard per rank, concatenated along the dim to infer, and the size that results."""
    dim, at, metadata = size.index(None), 0, []
    for rank, (shard,) in zip(ranks, per_rank, strict=True):
        if len(shard.shard_sizes) != len(size):
            raise ShardingSpecError(f"the shard on rank {rank} has {len(shard.shard_sizes)} dims, the size {size}")
        offsets = [0] * len(size)
        offsets[dim] = at
        at += shard.shard_sizes[dim]
        metadata.append([ShardMetadata(offsets, shard.shard_sizes, shard.placement)])
    return tuple(at if n is None else n for n in size), metadata


def check_ranks(metadata: ShardedTensorMetadata, group: dist.ProcessGroup) -> None:
    """Check that every shard is placed on a rank of the group.

    Raises:
        ShardingSpecError: One is not; names the shard, its rank and the ranks of the group.
    """
    allowed = members(group)
    for index, shard in enumerate(metadata.shards_metadata):
        if shard.rank not in allowed:
            raise ShardingSpecError(
                f"shard {index} is placed on {shard.placement}: global rank {shard.rank} is not among those of the "
                f"process group, {list(allowed)}"
            )


def checked_metadata(metadata: ShardedTensorMetadata, group: dist.ProcessGroup) -> ShardedTensorMetadata:
    """The metadata, if its shards are on ranks of the group and cover its size exactly; no communication.

    Raises:
        ArgumentTypeError: It is no ShardedTensorMetadata, as a spec of a user's own may return.
        ShardingSpecError: They are not.
    """
    expect("ShardedTensor", "metadata", metadata, ShardedTensorMetadata)
    check_ranks(metadata, group)
    validate_non_overlapping_shards_metadata(metadata.shards_metadata)
    check_tensor(metadata.shards_metadata, metadata.size)
    return replace(metadata, size=torch.Size(metadata.size))


def check_layout(properties: TensorProperties) -> None:
    """Check that the shards are strided and contiguous.

    Raises:
        ShardingSpecError: They would be something else.
    """
    if properties.layout != torch.strided or properties.memory_format != torch.contiguous_format:
        raise ShardingSpecError(
            "shards are torch.strided and torch.contiguous_format, asked for "
            f"{properties.layout} and {properties.memory_format}"
        )


def empty_local_tensors(metadata: ShardedTensorMetadata) -> list[torch.Tensor]:
    """Uninitialised local tensors of this rank's shards; one empty tensor if it has none, for its node in autograd."""
    properties = metadata.tensor_properties
    rank = dist.get_rank()
    local_tensors = [
        torch.empty(each.shard_sizes, dtype=properties.dtype, device=device_of(each), pin_memory=properties.pin_memory)
        for each in metadata.shards_metadata
        if each.rank == rank
    ]
    device = device_of(metadata.shards_metadata[0]).type  # this rank's current device of that type
    local_tensors = local_tensors or [torch.empty(0, dtype=properties.dtype, device=device)]
    return [local.requires_grad_(properties.requires_grad) for local in local_tensors]


def on_placements(local_tensors: Sequence[torch.Tensor], metadata: ShardedTensorMetadata) -> list[torch.Tensor]:
    """This rank's local tensors on the devices of the metadata's placements; copied only to another device."""
    rank = dist.get_rank()
    own = [device_of(each) for each in metadata.shards_metadata if each.rank == rank]
    return [local.to(device) for local, device in zip(local_tensors, own, strict=True)] if own else list(local_tensors)


def device_of(shard: ShardMetadata) -> torch.device:
    """Device of a shard that has a placement."""
    assert shard.placement is not None, "checked by ShardMetadata.rank"
    return shard.placement.device()


def refuse_rrefs(init_rrefs: bool) -> None:
    """Raise UnsupportedOpError for ``init_rrefs=True``: remote references are not supported (docs/adr/0010)."""
    if init_rrefs:
        raise UnsupportedOpError("init_rrefs: remote references over RPC are not supported; use gather or reshard")
