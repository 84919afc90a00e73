"""What torch.distributed.checkpoint asks of a tensor class it does not know: the bodies of three ShardedTensor methods.

It is imported when it calls, not before: importing it takes as long as importing torch's own tensor layers.
"""

from __future__ import annotations

from typing import Any

import torch

from .base import ShardedTensorBase
from .errors import CheckpointError
from .shard import Shard


def _filled(tensor: ShardedTensorBase) -> list[Shard]:
    """Shards with elements: an empty one would claim the place of the next in a checkpoint's index."""
    return [shard for shard in tensor.local_shards() if shard.tensor.numel() > 0]


def create_write_items(tensor: ShardedTensorBase, fqn: str, _: Any) -> list[Any]:
    """One write for every local shard."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.metadata import TensorProperties as Properties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = tensor.metadata().tensor_properties
    told = Properties(
        dtype=properties.dtype,
        layout=properties.layout,
        requires_grad=properties.requires_grad,
        memory_format=properties.memory_format,
        pin_memory=properties.pin_memory,
    )
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(shard.metadata.shard_offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(
                    torch.Size(shard.metadata.shard_offsets), torch.Size(shard.metadata.shard_sizes)
                ),
                properties=told,
                size=tensor.size(),
            ),
        )
        for shard in _filled(tensor)
    ]


def create_chunk_list(tensor: ShardedTensorBase) -> list[Any]:
    """The boxes that this rank wants to read."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(shard.metadata.shard_offsets), torch.Size(shard.metadata.shard_sizes))
        for shard in _filled(tensor)
    ]


def get_tensor_shard(tensor: ShardedTensorBase, index: Any) -> torch.Tensor:
    """The local shard at an index of a checkpoint, to be read or written in place.

    Raises:
        CheckpointError: No local shard begins there.
    """
    for shard in _filled(tensor):
        if index.offset is not None and tuple(index.offset) == tuple(shard.metadata.shard_offsets):
            return shard.tensor.detach()
    raise CheckpointError(
        f"{index.fqn}: no local shard begins at {index.offset}; the local ones begin at "
        f"{[shard.metadata.shard_offsets for shard in _filled(tensor)]}"
    )
