"""One shard: its local tensor and its metadata; and the checks of local shards against the metadata of their tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shoal_dtensor.internal import format_box, slices_of
from shoal_mesh.internal import dataclass

from ..arguments import expect, expect_plain
from ..errors import LocalShardError, ShardingSpecError
from ..spec.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties


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
        placement, size, expected = self.metadata.placement, list(self.tensor.shape), self.metadata.shard_sizes
        if size != expected:
            raise LocalShardError(
                f"shard {format_box(self.metadata.box)} on {placement}: its tensor has size {size}, "
                f"its metadata {expected}"
            )
        if placement is not None and placement.device().type != self.tensor.device.type:
            raise LocalShardError(
                f"shard {format_box(self.metadata.box)}: its tensor is on {self.tensor.device}, "
                f"its placement is {placement}"
            )

    @classmethod
    def from_tensor_and_offsets(cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int) -> Shard:
        """The shard of a local tensor that begins at ``shard_offsets``, placed on the tensor's device.

        Args:
            tensor: The local tensor.
            shard_offsets: First index along every dim of the global tensor.
            rank: Global rank of the holder.

        Raises:
            ArgumentTypeError: ``tensor`` is no tensor, or ``rank`` no integer.
            ShardingSpecError: The offsets are no integers, negative, or not one for each dim.
        """
        expect_plain("Shard.from_tensor_and_offsets", "tensor", tensor)
        expect("Shard.from_tensor_and_offsets", "rank", rank, int)
        return cls(tensor, ShardMetadata(shard_offsets, list(tensor.size()), f"rank:{rank}/{tensor.device}"))


def narrow_tensor_by_index(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A view of ``sizes`` elements along each dim, beginning at ``offsets``.

    Args:
        tensor: A plain tensor.
        offsets: First index along every dim.
        sizes: Number of elements along every dim.

    Raises:
        ArgumentTypeError: ``tensor`` is no tensor.
        ShardingSpecError: Offsets or sizes are not one integer for each dim, or reach beyond the tensor.

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
    if len(box) != tensor.dim() or any(stop > size for (_, stop), size in zip(box, tensor.shape, strict=True)):
        raise ShardingSpecError(f"shard {format_box(box)} is not inside a tensor of size {tuple(tensor.shape)}")
    return tensor[slices_of(box)]


def ordered_for(shards: Sequence[Shard], metadata: ShardedTensorMetadata) -> list[Shard]:
    """The local shards in the order of the metadata, if they are the shards that it places on this rank.

    Raises:
        LocalShardError: A shard is missing, surplus, or differs from the tensor in dtype, layout, requires_grad,
            pinning or contiguity.
    """
    rank = dist.get_rank()
    expected = [each for each in metadata.shards_metadata if each.rank == rank]
    given = {shard.metadata.box: shard for shard in shards}
    if len(given) != len(shards) or set(given) != {each.box for each in expected}:
        raise LocalShardError(
            f"rank {rank} must pass the shards {[format_box(each.box) for each in expected]}, "
            f"got {[format_box(shard.metadata.box) for shard in shards]}"
        )
    for shard in shards:
        check_properties(shard, metadata.tensor_properties)
    return [given[each.box] for each in expected]


def check_properties(shard: Shard, properties: TensorProperties) -> None:
    """Check dtype, layout, requires_grad, pinning and contiguity of a shard against the tensor's properties."""
    tensor, where = shard.tensor, f"shard {format_box(shard.metadata.box)} on {shard.metadata.placement}"
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
