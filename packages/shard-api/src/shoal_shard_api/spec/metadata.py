"""Metadata of a sharded tensor: shards, their common properties, size; and checks of the shards.

Field names and list types are those of ``torch.distributed._shard``, because they are compared and
pickled by users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from shoal_dtensor.internal import Box, box_at, format_box, gap, overlap
from shoal_mesh.internal import require, require_each

from .._torch import RemoteDevice
from ..errors import ArgumentTypeError, ShardingSpecError

Layout = tuple[tuple[int, Box], ...]
"""(global rank, box) of every shard, in the order of the metadata.

A box is one (start, stop) pair of global indices per dim. A layout is hashable, and functions are
cached by it.
"""


@dataclass(frozen=True, slots=True, init=False)
class ShardMetadata:
    """Offsets and sizes of one shard in the global tensor, and the rank and device that hold it.

    Args:
        shard_offsets: First index of the shard along every dim.
        shard_sizes: Number of elements along every dim; 0 for an empty shard.
        placement: "rank:1/cuda:1" (a global rank and its device), a parsed one, or None if unknown.

    Raises:
        ShardingSpecError: Offsets and sizes are not sequences of integers of one length, one is
            negative, or the placement cannot be parsed.

    Example:
        >>> ShardMetadata([2, 0], [2, 5], "rank:1/cpu").box
        ((2, 4), (0, 5))
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: RemoteDevice | None

    def __init__(
        self,
        shard_offsets: Sequence[int],
        shard_sizes: Sequence[int],
        placement: str | RemoteDevice | None = None,
    ) -> None:
        require_each(
            shard_offsets,
            int,
            "ShardMetadata: shard_offsets is a sequence of ints",
            ShardingSpecError,
            without=bool,
        )
        require_each(
            shard_sizes,
            int,
            "ShardMetadata: shard_sizes is a sequence of ints",
            ShardingSpecError,
            without=bool,
        )
        offsets = list(shard_offsets)
        sizes = list(shard_sizes)
        has_negative = any(number < 0 for number in [*offsets, *sizes])
        if len(offsets) != len(sizes) or has_negative:
            raise ShardingSpecError(
                f"each dim needs one offset and one size, both at least 0; got {len(offsets)} "
                f"offsets {offsets} and {len(sizes)} sizes {sizes}"
            )
        parsed = None if placement is None else parse_placement(placement)
        object.__setattr__(self, "shard_offsets", offsets)
        object.__setattr__(self, "shard_sizes", sizes)
        object.__setattr__(self, "placement", parsed)

    def __hash__(self) -> int:
        return hash((tuple(self.shard_offsets), tuple(self.shard_sizes), self.placement))

    @property
    def box(self) -> Box:
        """The shard's global indices: one (start, stop) pair per dim."""
        return box_at(self.shard_offsets, self.shard_sizes)

    @property
    def rank(self) -> int:
        """Global rank that holds the shard.

        Raises:
            ShardingSpecError: The placement is missing or names no rank.
        """
        rank = self.placement.rank() if self.placement is not None else None
        if rank is None:
            raise ShardingSpecError(
                f"the shard at {self.shard_offsets} has the placement {self.placement}; it must "
                "name a rank, such as 'rank:0/cpu' (RPC worker names are not supported)"
            )
        return int(rank)


def parse_placement(placement: str | RemoteDevice) -> RemoteDevice:
    """Parse "rank:1/cuda:1"; return a parsed placement unchanged.

    Raises:
        ShardingSpecError: ``placement`` is neither a text such as "rank:1/cuda:1" nor a
            RemoteDevice.
    """
    if isinstance(placement, RemoteDevice):
        return placement
    try:
        return RemoteDevice(placement)
    except (ValueError, TypeError, RuntimeError) as bad:
        raise ShardingSpecError(
            f"placement must read 'rank:<global rank>/<device>', got {placement!r}"
        ) from bad


class MEM_FORMAT_ENCODING(Enum):
    """Codes of memory formats in pickles, the same as in ``torch.distributed._shard``.

    Example:
        >>> MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value
        0
    """

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


# The index of a format is the value of its encoding.
_MEMORY_FORMATS = [torch.contiguous_format, torch.channels_last, torch.preserve_format]


@dataclass(frozen=True)
class TensorProperties:
    """dtype, layout, requires_grad, memory format and pinning of all shards, and global strides.

    Attributes:
        dtype: Element type; the default dtype unless given.
        layout: Always torch.strided for a ShardedTensor.
        memory_format: Always torch.contiguous_format for a ShardedTensor.
        requires_grad: True if the shards require gradients.
        pin_memory: True if the shards are in pinned host memory.
        strides: Strides of the global tensor; None for a contiguous one. The shards themselves are
            contiguous.

    Example:
        >>> TensorProperties.create_from_tensor(torch.zeros(2, dtype=torch.float64)).dtype
        torch.float64
    """

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False
    strides: tuple[int, ...] | None = None

    @staticmethod
    def create_from_tensor(tensor: Any) -> TensorProperties:
        """Read the properties of a plain tensor with its strides, as torch 2.15 does.

        Raises:
            ArgumentTypeError: ``tensor`` is not a tensor.
        """
        require(
            tensor,
            torch.Tensor,
            "TensorProperties.create_from_tensor: tensor is a Tensor",
            ArgumentTypeError,
        )
        return TensorProperties(
            tensor.dtype,
            tensor.layout,
            tensor.requires_grad,
            pin_memory=tensor.is_pinned(),
            strides=tensor.stride(),
        )

    @staticmethod
    def of_shards_like(tensor: Any) -> TensorProperties:
        """Read the properties of a tensor that all shards have; the global tensor is contiguous.

        Raises:
            ArgumentTypeError: ``tensor`` is not a tensor.
        """
        return replace(TensorProperties.create_from_tensor(tensor), strides=None)

    def __getstate__(self) -> dict[str, Any]:
        if self.memory_format not in _MEMORY_FORMATS:
            raise ShardingSpecError(
                f"memory format {self.memory_format} cannot be saved; known: {_MEMORY_FORMATS}"
            )
        encoding = MEM_FORMAT_ENCODING(_MEMORY_FORMATS.index(self.memory_format))
        return {**vars(self), "memory_format": encoding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        memory_format = _MEMORY_FORMATS[state["memory_format"].value]
        vars(self).update(state, memory_format=memory_format)


@dataclass(frozen=True)
class ShardedTensorMetadata:
    """The shards of a tensor on all ranks, its global size, and the properties of its shards.

    Attributes:
        shards_metadata: One entry per shard.
        size: Global size.
        tensor_properties: Properties that all shards share.

    Example:
        >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> spec.build_metadata(torch.Size([4]), TensorProperties()).layout
        ((0, ((0, 2),)), (1, ((2, 4),)))
    """

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    @property
    def layout(self) -> Layout:
        """Global rank and box of every shard, hashable."""
        return tuple((shard.rank, shard.box) for shard in self.shards_metadata)


def validate_non_overlapping_shards_metadata(shards: Sequence[ShardMetadata]) -> None:
    """Check that no two shards share an element.

    Args:
        shards: Metadata of the shards.

    Raises:
        ArgumentTypeError: ``shards`` is not a sequence of ShardMetadata.
        ShardingSpecError: Two shards overlap, or differ in the number of dims; it names both.

    Example:
        >>> first, second = ShardMetadata([0], [2]), ShardMetadata([2], [2])
        >>> validate_non_overlapping_shards_metadata([first, second])
    """
    require_each(
        shards,
        ShardMetadata,
        "validate_non_overlapping_shards_metadata: shards is a sequence of ShardMetadata",
        ArgumentTypeError,
    )
    for i, shard in enumerate(shards):
        first_ndim = len(shards[0].shard_sizes)
        ndim = len(shard.shard_sizes)
        if ndim != first_ndim:
            first = _describe(shards[0])
            raise ShardingSpecError(
                f"all shards must have the same number of dims: shard 0 {first} has {first_ndim}, "
                f"shard {i} {_describe(shard)} has {ndim}"
            )
    pair = overlap([shard.box for shard in shards])
    if pair is not None:
        i, j = pair
        one = _describe(shards[i])
        other = _describe(shards[j])
        raise ShardingSpecError(f"shards {i} {one} and {j} {other} overlap")


def check_tensor(shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Check that the shards, which must not overlap, cover a tensor of this size exactly.

    Args:
        shards_metadata: Metadata of the shards.
        tensor_dims: Global size.

    Raises:
        ArgumentTypeError: The shards are not a sequence of ShardMetadata, or the size is not a
            sequence of integers.
        ShardingSpecError: There are no shards, a shard has another number of dims, a shard reaches
            beyond the size, or elements are in no shard.

    Example:
        >>> check_tensor([ShardMetadata([0], [2]), ShardMetadata([2], [2])], (4,))
    """
    require_each(
        shards_metadata,
        ShardMetadata,
        "check_tensor: shards_metadata is a sequence of ShardMetadata",
        ArgumentTypeError,
    )
    require_each(
        tensor_dims,
        int,
        "check_tensor: tensor_dims is a sequence of ints",
        ArgumentTypeError,
        without=bool,
    )
    size = tuple(tensor_dims)
    if not shards_metadata:
        raise ShardingSpecError(f"a tensor of size {size} needs at least one shard, got none")
    for i, shard in enumerate(shards_metadata):
        name = f"shard {i} {_describe(shard)}"
        ndim = len(shard.shard_sizes)
        if ndim != len(size):
            raise ShardingSpecError(
                f"{name} has {ndim} dims, but the tensor of size {size} has {len(size)}"
            )
        if not is_inside(shard.box, size):
            raise ShardingSpecError(f"{name} reaches beyond the tensor of size {size}")
    missing = gap([shard.box for shard in shards_metadata], size)
    if missing is not None:
        raise ShardingSpecError(
            f"no shard holds the elements {format_box(missing)} of the tensor of size {size}"
        )


def is_inside(box: Box, size: Sequence[int]) -> bool:
    """Return whether a box ends at or before the end of a tensor along every dim.

    The box and the tensor have the same number of dims.
    """
    stops = [stop for _, stop in box]
    return all(stop <= length for stop, length in zip(stops, size, strict=True))


def _describe(shard: ShardMetadata) -> str:
    return f"{format_box(shard.box)} on {shard.placement}"
