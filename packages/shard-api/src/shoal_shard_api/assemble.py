"""From local shards on every rank to the metadata of the whole tensor: what the ranks tell each other, and the checks.

Each rank checks its own shards first; then one exchange of objects brings the errors, or the metadata, to all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from .errors import LocalShardError, RankMismatchError, ShardingSpecError, UnsupportedOpError
from .groups import agree, members
from .metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from .shard import Shard, check_properties
from .spec import check_tensor, validate_non_overlapping_shards_metadata


def flatten_size(size: Sequence[Any]) -> tuple[int | None, ...]:
    """The dims of ``f(2, 3)`` and ``f([2, 3])`` alike; None stands for a dim that is to be found out.

    Raises:
        TypeError: An entry is neither a whole number nor None.
    """
    dims = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    for dim in dims:
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            raise TypeError(f"the size must be whole numbers, got {dims}")
    return dims


def known_size(size: Sequence[Any]) -> torch.Size:
    """As ``flatten_size``, with no dim left open."""
    dims = [dim for dim in flatten_size(size) if dim is not None]
    if len(dims) != len(flatten_size(size)):
        raise TypeError(f"every dim of the size must be given here, got {flatten_size(size)}")
    return torch.Size(dims)


def describe(
    shards: Sequence[Shard], size: tuple[int | None, ...], group: dist.ProcessGroup
) -> tuple[ShardedTensorMetadata, list[Shard]]:
    """Metadata of the whole, the same on every rank, and this rank's shards in its order; all ranks call it.

    Args:
        shards: This rank's shards, none on some ranks.
        size: Global size.  One dim may be None if every rank has one shard: the shards then lie behind one another
            along it in the order of the ranks, whatever offsets they claim.
        group: The ranks that hold the tensor.

    Raises:
        LocalShardError: Local shards differ among themselves, or from those of another rank.
        RankMismatchError: Ranks passed different sizes.
        ShardingSpecError: The shards overlap, leave a gap, stick out, or are placed on other ranks.
    """
    rank = dist.get_rank()
    reports = agree(
        group,
        {
            "global size": size,
            "~properties": TensorProperties.create_from_tensor(shards[0].tensor) if shards else None,
            "~shards": [shard.metadata for shard in shards],
        },
        _local_error(shards, size, rank),
    )
    holders = members(group)
    properties = _common_properties([report["~properties"] for report in reports], holders)
    found = [list(report["~shards"]) for report in reports]
    local = list(shards)
    if None in size:
        size, found = _lined_up(found, size, holders)
        local = [Shard(shards[0].tensor, found[holders.index(rank)][0])]
    everything = [metadata for per_rank in found for metadata in per_rank]
    full = torch.Size([n for n in size if n is not None])
    validate_non_overlapping_shards_metadata(everything)
    check_tensor(everything, full)
    return ShardedTensorMetadata(everything, full, properties), local


def _local_error(shards: Sequence[Shard], size: tuple[int | None, ...], rank: int) -> Exception | None:
    if size.count(None) > 1:
        return ShardingSpecError(f"at most one dim of the global size may be None, got {size}")
    if None in size and len(shards) != 1:
        return LocalShardError(f"a size with an open dim, {size}, needs one shard on every rank; got {len(shards)}")
    try:
        for shard in shards:
            if shard.metadata.rank != rank:
                raise LocalShardError(f"a local shard is placed on {shard.metadata.placement}, but this is rank {rank}")
            check_properties(shard, TensorProperties.create_from_tensor(shards[0].tensor))
    except ValueError as error:
        return error
    return None


def _common_properties(found: Sequence[TensorProperties | None], ranks: Sequence[int]) -> TensorProperties:
    given = [(rank, each) for rank, each in zip(ranks, found, strict=True) if each is not None]
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


def _lined_up(
    found: list[list[ShardMetadata]], size: tuple[int | None, ...], ranks: Sequence[int]
) -> tuple[tuple[int | None, ...], list[list[ShardMetadata]]]:
    """Offsets along the open dim, one rank behind the other, and the size that results."""
    dim, at, placed = size.index(None), 0, []
    for rank, (shard,) in zip(ranks, found, strict=True):
        if len(shard.shard_sizes) != len(size):
            raise ShardingSpecError(f"the shard on rank {rank} has {len(shard.shard_sizes)} dims, the size {size}")
        offsets = [0] * len(size)
        offsets[dim] = at
        at += shard.shard_sizes[dim]
        placed.append([ShardMetadata(offsets, shard.shard_sizes, shard.placement)])
    return tuple(at if n is None else n for n in size), placed


def check_ranks(metadata: ShardedTensorMetadata, group: dist.ProcessGroup) -> None:
    """Check that every shard is held by a rank of the group.

    Raises:
        ShardingSpecError: One is not; names the shard, the rank and the group's ranks.
    """
    allowed = members(group)
    for index, shard in enumerate(metadata.shards_metadata):
        if shard.rank not in allowed:
            raise ShardingSpecError(
                f"shard {index} is placed on {shard.placement}: global rank {shard.rank} is not among those of the "
                f"process group, {list(allowed)}"
            )


def described_by(metadata: ShardedTensorMetadata, group: dist.ProcessGroup) -> ShardedTensorMetadata:
    """The metadata, after the checks that need no communication: ranks, overlap, coverage.

    Raises:
        ShardingSpecError: A check fails.
    """
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


def empty_parts(metadata: ShardedTensorMetadata) -> list[torch.Tensor]:
    """Unset data for this rank's shards; one empty tensor where it has none, which keeps its place in autograd."""
    properties = metadata.tensor_properties
    rank = dist.get_rank()
    parts = [
        torch.empty(each.shard_sizes, dtype=properties.dtype, device=device_of(each), pin_memory=properties.pin_memory)
        for each in metadata.shards_metadata
        if each.rank == rank
    ]
    device = device_of(metadata.shards_metadata[0]).type  # this rank's current device of that type
    parts = parts or [torch.empty(0, dtype=properties.dtype, device=device)]
    return [part.requires_grad_(properties.requires_grad) for part in parts]


def placed(parts: Sequence[torch.Tensor], metadata: ShardedTensorMetadata) -> list[torch.Tensor]:
    """This rank's data on the devices that the metadata name; no copy where they are there."""
    rank = dist.get_rank()
    own = [device_of(each) for each in metadata.shards_metadata if each.rank == rank]
    return [part.to(device) for part, device in zip(parts, own, strict=True)] if own else list(parts)


def device_of(shard: ShardMetadata) -> torch.device:
    """Device of a shard whose placement has been checked."""
    assert shard.placement is not None, "a placement without a rank is refused before"
    return shard.placement.device()


def refuse_rrefs(init_rrefs: bool) -> None:
    """Raise UnsupportedOpError where remote references are asked for: they are left out (docs/adr/0010)."""
    if init_rrefs:
        raise UnsupportedOpError("init_rrefs: remote references over RPC are left out; use gather or reshard")
