"""The protocol of torch.distributed.checkpoint for tensor classes that are not its own: three methods of ShardedTensor.

torch.distributed.checkpoint is imported inside of them: its import takes as long as that of torch's own DTensor.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CheckpointError
from .shard import Shard
from .sharded_tensor_base import ShardedTensorBase


def _filled(tensor: ShardedTensorBase) -> list[Shard]:
    """Shards with elements: an empty shard has the offsets of the next, which a checkpoint's index has once."""
    return [shard for shard in tensor.local_shards() if shard.tensor.numel() > 0]


def create_write_items(tensor: ShardedTensorBase, fqn: str, _: Any) -> list[Any]:
    """One write item per local shard that has elements."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties as Properties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = tensor.metadata().tensor_properties
    saved_properties = Properties(
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
                properties=saved_properties,
                size=tensor.size(),
            ),
        )
        for shard in _filled(tensor)
    ]


def create_chunk_list(tensor: ShardedTensorBase) -> list[Any]:
    """Offsets and sizes that this rank reads."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(shard.metadata.shard_offsets), torch.Size(shard.metadata.shard_sizes))
        for shard in _filled(tensor)
    ]


def get_tensor_shard(tensor: ShardedTensorBase, index: Any) -> torch.Tensor:
    """The local tensor at an index of a checkpoint, without its autograd history; it is read, or written in place.

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
