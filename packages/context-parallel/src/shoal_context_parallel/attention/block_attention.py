"""Attention of this rank's queries to the keys and values of all ranks, block by block.

q, k, v: S(sequence) -> S(sequence). Only the rank's own tensors are saved for backward; blocks are
sent again in backward.

A block is one flat tensor with the keys, then the values, of one rank. `rotations` brings the
blocks of all ranks to this rank. Each block contributes a part of the softmax, which `merge` adds
to the result.

Tensors are folded: queries are (n, group, length, width) and keys (n, 1, length, width). n counts
batch rows times heads of keys, and `group` query heads share a head of keys.

May import: attention_kernels, rotations, tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor.internal import apply, first_order_only, unwatched, unwatched_functions
from shoal_mesh import Comm

from ..sequence_layout import AttentionMask, SequenceLayout
from .attention_kernels import BlockKernel
from .rotations import ROTATIONS
from .tiles import Tile, tiles

FIRST_ORDER = (
    "attention of a sharded sequence cannot be differentiated twice: call backward() without "
    "create_graph=True"
)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge the attention of a block into the previous result, in place: the online softmax.

    The attention over both sets of keys is the mean of the two outputs, weighted by their sums of
    exponentials.

    Args:
        out: the previous output, (..., queries, width).
        lse: the logarithm of its sums of exponentials, (..., queries); -inf for queries that have
            not read a key yet.
        block_out: the output over the keys of the block.
        block_lse: the logarithm of its sums of exponentials.
    """
    # Example: the sums of exponentials are 1 before and 3 in the block -> log 4.
    merged_lse = torch.logaddexp(lse, block_lse)
    # zero for queries that have not read any key, so that the differences below are not NaN
    finite_lse = merged_lse.masked_fill(merged_lse == -torch.inf, 0)
    # Example, continued: the weights are 1 / 4 for the previous output, and 3 / 4 for the block's.
    weight = (lse - finite_lse).exp_().unsqueeze(-1)
    block_weight = (block_lse - finite_lse).exp_().unsqueeze(-1)
    out.mul_(weight).addcmul_(block_out.to(out.dtype), block_weight)
    lse.copy_(merged_lse)


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """The settings that all blocks of one attention share, and views of its folded tensors.

    Attributes:
        layout: positions of each rank; a layout of one rank if this rank holds the whole sequence.
        comm: the communicator along the axis of the sequence.
        mask: the keys that a query reads.
        kernel: attention inside a tile.
        rotation: a key of `ROTATIONS`; "ring" if this rank holds the whole sequence.
        batch: number of batch rows; the first dim of folded tensors is `batch * heads of keys`.
    """

    layout: SequenceLayout
    comm: Comm
    mask: AttentionMask
    kernel: BlockKernel
    rotation: str
    batch: int

    @property
    def rank(self) -> int:
        """This rank's place in the layout."""
        return self.comm.rank if self.layout.ranks > 1 else 0

    def queries_of(self, tile: Tile, folded: Tensor) -> Tensor:
        """Return a tile's queries, outputs or gradients of (n, group, local length, width)."""
        return self._rows_of(tile, folded)[..., tile.queries, :]

    def keys_of(self, tile: Tile, folded: Tensor) -> Tensor:
        """Return a tile's keys, values or gradients of (n, 1, block length, width)."""
        return self._rows_of(tile, folded)[..., tile.keys, :]

    def log_sums_of(self, tile: Tile, folded: Tensor) -> Tensor:
        """Return the log-sums of a tile's queries, of (n, group, local length)."""
        return self._rows_of(tile, folded)[..., tile.queries]

    def _rows_of(self, tile: Tile, folded: Tensor) -> Tensor:
        """Return the rows of a folded tensor that belong to the batch row of a tile."""
        if tile.row is None:
            return folded
        # Example: 3 batch rows with 2 heads of keys, folded to 6 rows -> batch row 1 has 2:4.
        key_heads = folded.shape[0] // self.batch
        first_row = tile.row * key_heads
        return folded[first_row : first_row + key_heads]


class _BlockShapes:
    """Shapes of the ranks' blocks of keys and values, as flat tensors.

    Attributes:
        elements: number of elements of each rank's block.
    """

    def __init__(self, k: Tensor, v: Tensor, layout: SequenceLayout) -> None:
        self._key_width = k.shape[-1]
        self._value_width = v.shape[-1]
        # Example: 6 folded rows, 4 positions of a rank -> (6, 1, 4).
        self._shapes = [(k.shape[0], 1, length) for length in layout.sizes]
        # Example, continued: keys and values of width 8 -> 6 * 4 * (8 + 8) = 384 elements.
        width = self._key_width + self._value_width
        self.elements = [prod(shape) * width for shape in self._shapes]

    def keys_and_values(self, block: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """Return views of the flat block of rank `owner` as keys and values.

        Their shape is (n, 1, length, width).
        """
        shape = self._shapes[owner]
        # Example, continued: 6 * 4 = 24 keys of 8 elements, then 24 values of 8 elements.
        count = prod(shape)
        sizes = [count * self._key_width, count * self._value_width]
        k, v = torch.split_with_sizes(block, sizes)
        return k.view(*shape, self._key_width), v.view(*shape, self._value_width)


class RotatedAttention(Function):
    """Attention of a sharded sequence, q, k, v: S -> S, as an autograd function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, task: AttentionTask) -> Tensor:
        shapes = _BlockShapes(k, v, task.layout)
        ctx.shapes = shapes
        own_block = torch.cat([k.reshape(-1), v.reshape(-1)])
        # Partial results are merged in float32 or float64, and rounded once at the end.
        merge_dtype = torch.promote_types(q.dtype, torch.float32)
        # (n, group, local length)
        shape_of_queries = q.shape[:-1]
        out = q.new_zeros((*shape_of_queries, v.shape[-1]), dtype=merge_dtype)
        lse = q.new_full(shape_of_queries, -torch.inf, dtype=merge_dtype)
        rotation = ROTATIONS[task.rotation]
        for owner, block in rotation.blocks(own_block, shapes.elements, task.comm):
            keys, values = shapes.keys_and_values(block, owner)
            for tile in tiles(task.layout, task.rank, owner, task.mask):
                tile_q = task.queries_of(tile, q)
                tile_k = task.keys_of(tile, keys)
                tile_v = task.keys_of(tile, values)
                block_out, block_lse = task.kernel.forward(tile_q, tile_k, tile_v, tile)
                tile_out = task.queries_of(tile, out)
                tile_lse = task.log_sums_of(tile, lse)
                merge(tile_out, tile_lse, block_out, block_lse)
        result = out.to(q.dtype)
        # A query that reads no key has the output 0. With a log-sum of 0, its softmax in backward
        # is exp(-inf - 0) = 0, so it does not have a gradient.
        finite_lse = lse.masked_fill_(lse == -torch.inf, 0)
        ctx.save_for_backward(q, own_block, result, finite_lse)
        ctx.task = task
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only(FIRST_ORDER)
        q, own_block, out, lse = ctx.saved_tensors
        task: AttentionTask = ctx.task
        shapes: _BlockShapes = ctx.shapes
        grad = grad.contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)

        def add_gradients(owner: int, block: Tensor) -> Tensor:
            """Add to `dq`; return the term of the block's gradient from this rank's queries."""
            block_grad = torch.zeros_like(block, dtype=lse.dtype)
            keys, values = shapes.keys_and_values(block, owner)
            dk, dv = shapes.keys_and_values(block_grad, owner)
            for tile in tiles(task.layout, task.rank, owner, task.mask):
                tile_grad = task.queries_of(tile, grad)
                tile_q = task.queries_of(tile, q)
                tile_k = task.keys_of(tile, keys)
                tile_v = task.keys_of(tile, values)
                tile_out = task.queries_of(tile, out)
                tile_lse = task.log_sums_of(tile, lse)
                tile_dq, tile_dk, tile_dv = task.kernel.backward(
                    tile_grad, tile_q, tile_k, tile_v, out=tile_out, lse=tile_lse, tile=tile
                )
                task.queries_of(tile, dq).add_(tile_dq)
                task.keys_of(tile, dk).add_(tile_dk)
                task.keys_of(tile, dv).add_(tile_dv)
            return block_grad

        rotation = ROTATIONS[task.rotation]
        # Modes for torch functions need not observe the many functions on tiles.
        with unwatched_functions():
            blocks = rotation.blocks(own_block, shapes.elements, task.comm)
            own_grad = rotation.gradients(add_gradients, blocks, shapes.elements, task.comm)
        dk, dv = shapes.keys_and_values(own_grad, task.rank)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None


def rotated_attention(q: Tensor, k: Tensor, v: Tensor, task: AttentionTask) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks.

    Args:
        q: (batch, query heads, local length, width).
        k: (batch, heads of keys, local length, width).
        v: (batch, heads of keys, local length, width of values).
        task: the settings.

    Returns:
        (batch, query heads, local length, width of values).
    """
    # Example: a batch of 3, and 8 query heads with 2 heads of keys -> n is 6, and the group of a
    # head of keys is 4 query heads.
    batch, key_heads = k.shape[:2]
    folded = batch * key_heads
    group = q.shape[1] // max(key_heads, 1)
    keys = k.reshape(folded, 1, *k.shape[2:])
    values = v.reshape(folded, 1, *v.shape[2:])
    queries = q.reshape(folded, group, *q.shape[2:]).contiguous()
    with unwatched():
        out: Tensor = apply(RotatedAttention, queries, keys, values, task)
    return out.reshape(*q.shape[:-1], v.shape[-1])
