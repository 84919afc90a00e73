"""One shard: its data and where it lies; and the checks that local shards must pass before they become a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .boxes import show
from .errors import LocalShardError, ShardingSpecError
from .metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties


@dataclass(slots=True)
class Shard:
    """Data of one shard and its place in the tensor.

    Raises:
        LocalShardError: The data have another size, or another type of device, than the metadata say.
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        if list(self.tensor.size()) != self.metadata.shard_sizes:
            raise LocalShardError(
                f"shard {show(self.metadata.box)} on {self.metadata.placement}: its tensor has size "
                f"{list(self.tensor.size())}, its metadata say {self.metadata.shard_sizes}"
            )
        placement = self.metadata.placement
        if placement is not None and placement.device().type != self.tensor.device.type:
            raise LocalShardError(
                f"shard {show(self.metadata.box)}: its tensor is on {self.tensor.device}, its placement is {placement}"
            )

    @classmethod
    def from_tensor_and_offsets(cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int) -> Shard:
        """The shard that begins at ``shard_offsets`` and that global rank ``rank`` holds on the tensor's device."""
        return cls(tensor, ShardMetadata(shard_offsets, list(tensor.size()), f"rank:{rank}/{tensor.device}"))


def narrow_tensor_by_index(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A view of ``sizes`` elements along each dim, beginning at ``offsets``."""
    if not len(offsets) == len(sizes) == tensor.dim():
        raise ShardingSpecError(f"offsets {list(offsets)} and sizes {list(sizes)} do not fit {tensor.dim()} dims")
    return tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """The view of a full tensor that one shard holds."""
    return narrow_tensor_by_index(tensor, metadata.shard_offsets, metadata.shard_sizes)


def ordered_for(shards: Sequence[Shard], metadata: ShardedTensorMetadata) -> list[Shard]:
    """The local shards in the order of the metadata, after a check that they are what it says this rank holds.

    Raises:
        LocalShardError: A shard is missing, surplus, or differs from the tensor in dtype, layout, requires_grad,
            pinning or contiguity.
    """
    rank = dist.get_rank()
    wanted = [each for each in metadata.shards_metadata if each.rank == rank]
    found = {shard.metadata.box: shard for shard in shards}
    if len(found) != len(shards) or set(found) != {each.box for each in wanted}:
        raise LocalShardError(
            f"rank {rank} must give the shards {[show(each.box) for each in wanted]}, "
            f"got {[show(shard.metadata.box) for shard in shards]}"
        )
    for shard in shards:
        check_properties(shard, metadata.tensor_properties)
    return [found[each.box] for each in wanted]


def check_properties(shard: Shard, properties: TensorProperties) -> None:
    """Check dtype, layout, requires_grad, pinning and contiguity of a shard against the tensor's properties."""
    tensor, where = shard.tensor, f"shard {show(shard.metadata.box)} on {shard.metadata.placement}"
    if properties.layout != torch.strided:
        raise LocalShardError(f"{where}: only the layout torch.strided is supported, got {properties.layout}")
    if not tensor.is_contiguous():
        raise LocalShardError(f"{where}: its tensor of size {list(tensor.size())} is not contiguous")
    actual = TensorProperties.create_from_tensor(tensor)
    for name in ("dtype", "layout", "requires_grad", "pin_memory"):
        if getattr(actual, name) != getattr(properties, name):
            raise LocalShardError(
                f"{where}: its {name} is {getattr(actual, name)}, the sharded tensor's is {getattr(properties, name)}"
            )
