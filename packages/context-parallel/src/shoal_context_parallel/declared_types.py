"""Types of the autograd functions of attention on a sharded sequence.

May import: attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from shoal_dtensor.errors import SpmdTypeError
from shoal_dtensor.internal import ShardType as Shard, V, spmd

from .attention.block_attention import RotatedAttention
from .attention.ulysses import HeadExchange


def _check_own_rows(tensor: Tensor, axis: spmd.MeshAxis) -> None:
    """Refuse a tensor that is equal on the ranks, or partial."""
    present = spmd.type_of(tensor)
    axis_type = V if present is None else present.by_axis.get(axis, V)
    if not isinstance(axis_type, spmd.Shard | spmd.FoldedShard) and axis_type is not V:
        raise SpmdTypeError(
            f"{spmd.user_line()}: attention of a sharded sequence takes each rank's positions, a "
            f"shard over {axis!r}, and got {axis_type}"
        )


def _declare_rotated(outputs: Any, args: tuple[Any, ...]) -> None:
    query, key, value, task = args
    for tensor in (query, key, value):
        _check_own_rows(tensor, spmd.normalize_axis(task.comm))
    spmd.set_type(outputs, spmd.type_of(query))


def _declare_heads(outputs: Any, args: tuple[Any, ...]) -> None:
    moves, *tensors = args
    for output, tensor, (source, target) in zip(outputs, tensors, moves, strict=True):
        if spmd.type_of(tensor) is None:
            continue
        axis = spmd.axes_of(source.mesh)[0]
        _check_own_rows(tensor, axis)
        (dim,) = [sharding_dim for sharding_dim, _ in target.shard_order]
        axis_type = Shard(dim) if target.even else V
        spmd.set_type(output, spmd.moved_type(tensor, axis, axis_type, output.ndim))


spmd.hide_frames_of(str(Path(__file__).parent))
spmd.declare_types(RotatedAttention, _declare_rotated)
spmd.declare_types(HeadExchange, _declare_heads)
