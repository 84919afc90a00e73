"""What torch.distributed.checkpoint asks of a tensor that it does not know: this rank's box and its data.

The protocol is duck-typed (`__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`), so a DTensor
saved on one mesh loads onto another.  The checkpoint package is imported only when one of these is called.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import PlacementError
from .spec import Spec

__all__ = ["chunk_list", "refuse_partial", "shard", "write_items"]


def refuse_partial(spec: Spec) -> None:
    """Refuse to save or load values that are still to be reduced.

    Raises:
        PlacementError: if the spec is partial.
    """
    if spec.partials:
        raise PlacementError(f"a checkpoint cannot hold {spec!r}: redistribute it to Replicate or Shard first")


def _sizes(spec: Spec) -> torch.Size:
    return torch.Size([0] * spec.ndim) if spec.coordinate is None else spec.local_shape


def write_items(fqn: str, tensor: Any, spec: Spec) -> list[Any]:
    """The write item of this rank's box."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    refuse_partial(spec)
    if spec.coordinate is None:
        return []
    offsets = torch.Size(spec.local_offset)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=_sizes(spec)),
        properties=TensorProperties.create_from_tensor(tensor._local_tensor),
        size=torch.Size(spec.shape),
    )
    return [WriteItem(index=MetadataIndex(fqn, offsets), type=WriteItemType.SHARD, tensor_data=data)]


def chunk_list(spec: Spec) -> list[Any]:
    """The chunk that this rank reads or writes."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    refuse_partial(spec)
    if spec.coordinate is None:
        return []
    return [ChunkStorageMetadata(offsets=torch.Size(spec.local_offset), sizes=_sizes(spec))]


def shard(index: Any, spec: Spec, local: torch.Tensor) -> torch.Tensor:
    """The local tensor for a metadata index.

    Raises:
        PlacementError: if the index names a box that this rank does not hold.
    """
    refuse_partial(spec)
    if index.offset is not None and tuple(index.offset) != spec.local_offset:
        raise PlacementError(f"checkpoint index {index} is not the box at {spec.local_offset} of {spec!r}")
    return local
