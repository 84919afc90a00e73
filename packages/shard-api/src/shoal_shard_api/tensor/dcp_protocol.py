"""How torch.distributed.checkpoint reads and writes a ShardedTensor: its protocol for classes of others."""

from __future__ import annotations

from typing import Any

import torch

from shoal_dtensor.internal import chunks_of, write_items

from ..errors import CheckpointError
from .shard import Shard
from .sharded_tensor_base import ShardedTensorBase


def _filled(tensor: ShardedTensorBase) -> list[Shard]:
    """Shards with elements: an empty shard has the offsets of the next, which a checkpoint's index has once."""
    return [shard for shard in tensor.local_shards() if shard.tensor.numel() > 0]


def create_write_items(tensor: ShardedTensorBase, fqn: str, _: Any) -> list[Any]:
    """One write item per local shard that has elements."""
    return write_items(fqn, create_chunk_list(tensor), tensor.size(), tensor._local_tensors[0])


def create_chunk_list(tensor: ShardedTensorBase) -> list[Any]:
    """Offsets and sizes that this rank reads."""
    return chunks_of(shard.metadata.box for shard in _filled(tensor))


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
