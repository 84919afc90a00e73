"""What a sharded tensor is made of, as data: shards, tensor properties, the whole.

Field names and list types are those of ``torch.distributed._shard``, because they are compared and pickled by users.
No process group and no tensor data here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import torch

from ._torch import RemoteDevice
from .boxes import Box, box
from .errors import ShardingSpecError

Layout = tuple[tuple[int, Box], ...]
"""Who holds what: (global rank, box) of every shard, in the order of the metadata.  Hashable, so plans are cached."""


@dataclass(frozen=True, slots=True, init=False)
class ShardMetadata:
    """Where one shard lies in the tensor and who holds it.

    Args:
        shard_offsets: First index of the shard along every dim.
        shard_sizes: Number of elements along every dim.
        placement: Holder, as "rank:1/cuda:1" (a global rank and a device there), a parsed one, or None if unknown.

    Raises:
        ShardingSpecError: Offsets and sizes differ in length, or one is negative.
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: RemoteDevice | None

    def __init__(
        self, shard_offsets: Sequence[int], shard_sizes: Sequence[int], placement: str | RemoteDevice | None = None
    ) -> None:
        offsets, sizes = list(shard_offsets), list(shard_sizes)
        if len(offsets) != len(sizes):
            raise ShardingSpecError(
                f"shard_offsets and shard_sizes must have one entry for each dim: got {len(offsets)} offsets "
                f"{offsets} and {len(sizes)} sizes {sizes}"
            )
        if any(n < 0 for n in (*offsets, *sizes)):
            raise ShardingSpecError(
                f"shard_offsets and shard_sizes must be >= 0: got offsets {offsets} and sizes {sizes}"
            )
        object.__setattr__(self, "shard_offsets", offsets)
        object.__setattr__(self, "shard_sizes", sizes)
        object.__setattr__(self, "placement", parse_placement(placement) if placement is not None else None)

    def __hash__(self) -> int:
        return hash((tuple(self.shard_offsets), tuple(self.shard_sizes), self.placement))

    @property
    def box(self) -> Box:
        """The shard's indices as (start, stop) pairs."""
        return box(self.shard_offsets, self.shard_sizes)

    @property
    def rank(self) -> int:
        """Global rank of the holder.

        Raises:
            ShardingSpecError: The placement is missing or names no rank.
        """
        rank = self.placement.rank() if self.placement is not None else None
        if rank is None:
            raise ShardingSpecError(
                f"shard at offsets {self.shard_offsets} has placement {self.placement}: 'rank:<global rank>/<device>' "
                "is needed (RPC worker names are not supported)"
            )
        return int(rank)


def parse_placement(placement: str | RemoteDevice) -> RemoteDevice:
    """The parsed form of "rank:1/cuda:1"; one that is parsed already comes back as it is.

    Raises:
        ShardingSpecError: The text is in no such form, or the value is neither text nor a parsed placement.
    """
    if isinstance(placement, RemoteDevice):
        return placement
    try:
        return RemoteDevice(placement)
    except (ValueError, TypeError, RuntimeError) as bad:
        raise ShardingSpecError(f"placement must read 'rank:<global rank>/<device>', got {placement!r}") from bad


class MEM_FORMAT_ENCODING(Enum):
    """Names for memory formats in pickles (torch.memory_format has no stable one of its own)."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


_MEMORY_FORMATS = {
    MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT: torch.contiguous_format,
    MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST: torch.channels_last,
    MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT: torch.preserve_format,
}


@dataclass(frozen=True)
class TensorProperties:
    """What the shards of a tensor have in common besides their data."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """The properties of ``tensor``."""
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            pin_memory=tensor.is_pinned(),
        )

    def __getstate__(self) -> dict[str, Any]:
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        names = {fmt: name for name, fmt in _MEMORY_FORMATS.items()}
        if self.memory_format not in names:
            raise ShardingSpecError(f"memory format {self.memory_format} cannot be saved; known: {list(names)}")
        return {**state, "memory_format": names[self.memory_format]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "memory_format": _MEMORY_FORMATS[state["memory_format"]]})


@dataclass(frozen=True)
class ShardedTensorMetadata:
    """All shards of a tensor, its size, and what the shards have in common."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    @property
    def layout(self) -> Layout:
        """Holder and box of every shard, hashable."""
        return tuple((shard.rank, shard.box) for shard in self.shards_metadata)


def moved_to(metadata: ShardedTensorMetadata, devices: Mapping[int, torch.device]) -> ShardedTensorMetadata:
    """The same shards on other devices of the same ranks; ``devices`` maps a global rank to its device."""
    shards = [
        ShardMetadata(each.shard_offsets, each.shard_sizes, f"rank:{each.rank}/{devices[each.rank]}")
        for each in metadata.shards_metadata
    ]
    return replace(metadata, shards_metadata=shards)
