"""Checks of tensors, and ways from classes of torch's shard API to those of this package.

May import: errors.
"""

from __future__ import annotations

import torch

from shoal_mesh.internal import kind_of, require, ways_out

from .errors import ArgumentTypeError

_TORCH_CLASSES = (
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "ShardingPlan",
    "TensorProperties",
)
for _name in _TORCH_CLASSES:
    ways_out["torch.distributed._shard", _name] = f"use shoal_shard_api.{_name}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is strided, and not a wrapper such as a ShardedTensor or a DTensor."""
    is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not is_wrapper and tensor.layout == torch.strided


def require_plain(tensor: object, taken: str) -> None:
    """Raise ArgumentTypeError unless given a plain strided tensor; ``taken`` says so in words."""
    require(tensor, torch.Tensor, taken, ArgumentTypeError)
    assert isinstance(tensor, torch.Tensor), "required"
    if not is_plain(tensor):
        raise ArgumentTypeError(f"{taken}, got {kind_of(tensor)}, {tensor.layout}")
