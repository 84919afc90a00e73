"""SPMD types of the autograd functions of attention on a sharded sequence.

The type checker does not check what an autograd function computes inside. Each declaration checks
the types of a function's inputs, and gives its outputs their types.

May import: attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal_dtensor.errors import SpmdTypeError
from shoal_dtensor.internal import ShardType as Shard, V, spmd

from .attention.block_attention import RotatedAttention
from .attention.ulysses import HeadExchange, HeadMove


def _check_own_rows(tensor: Tensor, axis: spmd.MeshAxis) -> None:
    """Refuse a tensor that is equal on the ranks, or partial."""
    declared = spmd.type_of(tensor)
    # A tensor without a type may differ by rank: V (varying).
    axis_type = V if declared is None else declared.by_axis.get(axis, V)
    is_shard = isinstance(axis_type, spmd.Shard | spmd.FoldedShard)
    if not is_shard and axis_type is not V:
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
    moves: Sequence[HeadMove] = args[0]
    tensors: Sequence[Tensor] = args[1:]
    for output, tensor, move in zip(outputs, tensors, moves, strict=True):
        if spmd.type_of(tensor) is None:
            continue
        axis = spmd.axes_of(move.source.mesh)[0]
        _check_own_rows(tensor, axis)
        # The mesh has one axis, so one dim is sharded: the positions, or the heads.
        ((sharded_dim, _),) = move.target.shard_order
        # The type of a shard implies equal sizes on all ranks.
        axis_type = Shard(sharded_dim) if move.target.even else V
        spmd.set_type(output, spmd.moved_type(tensor, axis, axis_type, output.ndim))


# Errors of the checker name the user's line, not a line of this package.
spmd.hide_frames_of(str(Path(__file__).parent))
spmd.declare_types(RotatedAttention, _declare_rotated)
spmd.declare_types(HeadExchange, _declare_heads)
