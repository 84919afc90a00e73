"""Attention of this rank's queries to the keys and values of all ranks, block by block.

q, k, v: S(sequence) -> S(sequence). Only the rank's own tensors are saved for backward; blocks are
sent again in backward.

A block is one flat tensor with the keys, then the values, of one rank. Blocks are sent around a
ring, or gathered. Their gradients are sent around the ring too, or reduce-scattered. Each generator
of blocks yields the rank's own block first, and starts the next message before it yields, so that a
block is in flight while the computation uses the previous one.

Each block contributes a part of the softmax, which `merge` adds to the result. Queries are (n,
group, length, width) and keys (n, 1, length, width): n counts batch rows times heads of keys, and
`group` query heads share a head of keys.

May import: attention_kernels, tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor.internal import apply, first_order_only, unwatched, unwatched_functions
from shoal_mesh import Comm, all_gather_v, all_to_all_v, purpose, reduce_scatter_v
from shoal_mesh.internal import Pending

from ..sequence_layout import AttentionMask, SequenceLayout
from .attention_kernels import BlockKernel
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
    total = torch.logaddexp(lse, block_lse)
    # zero for queries that have not read any key, so that the differences below are not NaN
    finite = total.masked_fill(total == -torch.inf, 0)
    # Example, continued: the weights are 1 / 4 for the previous output, and 3 / 4 for the block's.
    weight = (lse - finite).exp_().unsqueeze(-1)
    block_weight = (block_lse - finite).exp_().unsqueeze(-1)
    out.mul_(weight).addcmul_(block_out.to(out.dtype), block_weight)
    lse.copy_(total)


@dataclass(frozen=True, slots=True)
class Task:
    """The settings that all blocks of one attention share.

    Attributes:
        layout: positions of each rank; a layout of one rank if this rank holds the whole sequence.
        comm: the axis.
        mask: the keys that a query reads.
        kernel: attention inside a tile.
        rotation: "ring", also for one rank, or "allgather".
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

    def rows(self, tile: Tile, folded: Tensor) -> Tensor:
        """Return the rows of a folded tensor that belong to the batch row of a tile."""
        if tile.row is None:
            return folded
        # Example: 3 batch rows with 2 heads of keys, folded to 6 rows -> batch row 1 has 2:4.
        heads = folded.shape[0] // self.batch
        first_row = tile.row * heads
        return folded[first_row : first_row + heads]

    def queries(self, tile: Tile, folded: Tensor) -> Tensor:
        """Return the queries of a tile in a folded tensor (n, group, queries, width)."""
        return self.rows(tile, folded)[..., tile.queries, :]

    def keys(self, tile: Tile, folded: Tensor) -> Tensor:
        """Return the keys of a tile in a folded tensor (n, 1, keys, width)."""
        return self.rows(tile, folded)[..., tile.keys, :]

    def sums(self, tile: Tile, folded: Tensor) -> Tensor:
        """Return the log-sums of a tile's queries in a folded tensor (n, group, queries)."""
        return self.rows(tile, folded)[..., tile.queries]


# Blocks, each with the rank to which it belongs.
Blocks = Iterator[tuple[int, Tensor]]
# Function of a rank and its block: the term of the block's gradient from this rank's queries.
Gradient = Callable[[int, Tensor], Tensor]


def around_ring(block: Tensor, sizes: list[int], comm: Comm) -> Blocks:
    """Yield each rank's block in turn, starting with this rank's block.

    Two blocks, of `sizes` elements, are in memory at a time.
    """
    # Example: of 3 ranks, rank 1 yields the blocks of 1 0 2. If a rank holds the whole sequence,
    # there is one block, 0.
    owner = comm.rank % len(sizes)
    for _ in range(len(sizes) - 1):
        pending = _to_next(block, sizes, owner, comm, contents="keys and values")
        yield owner, block
        # Example: of 3 ranks, the block of 2 follows the block of 0.
        block = pending.wait()
        owner = (owner - 1) % comm.size
    yield owner, block


def ring_gradients(gradient: Gradient, blocks: Blocks, sizes: list[int], comm: Comm) -> Tensor:
    """Return the gradient of this rank's block, as a sum that is sent around the ring.

    Each rank adds its term while it has the block. After the last step the sum is back on the rank
    that owns the block.
    """
    arriving: Pending | None = None
    for owner, block in blocks:
        summed = gradient(owner, block)
        if len(sizes) == 1:
            return summed
        if arriving is not None:
            summed += arriving.wait()
        arriving = _to_next(summed, sizes, owner, comm, contents="gradients of keys and values")
    assert arriving is not None, "the ring ran at least one step"
    return arriving.wait()


def _to_next(block: Tensor, sizes: list[int], owner: int, comm: Comm, *, contents: str) -> Pending:
    """Send a block to the next rank, and receive a block from the previous rank.

    The received block belongs to the owner before `owner`.
    """
    send = [0] * comm.size
    receive = [0] * comm.size
    next_rank = (comm.rank + 1) % comm.size
    previous_rank = (comm.rank - 1) % comm.size
    send[next_rank] = block.numel()
    # Example: rank 1 sends its own block to rank 2, and receives the block of 0 from rank 0.
    receive[previous_rank] = sizes[(owner - 1) % comm.size]
    with purpose(f"ring attention: {contents}"):
        return all_to_all_v(block, comm, send, receive, async_op=True)


def gathered_blocks(block: Tensor, sizes: list[int], comm: Comm) -> Blocks:
    """Yield each rank's block, in the order of `around_ring`, all from one all-gather."""
    with purpose("attention: gather keys and values"):
        pending = all_gather_v(block, comm, sizes, async_op=True)
    yield comm.rank, block
    blocks = torch.split_with_sizes(pending.wait(), sizes)
    for step in range(1, comm.size):
        # Example: rank 1 of 3 yields the blocks of 0 and 2 after its own.
        owner = (comm.rank - step) % comm.size
        yield owner, blocks[owner]


def gathered_gradients(gradient: Gradient, blocks: Blocks, sizes: list[int], comm: Comm) -> Tensor:
    """Return the gradient of this rank's block: the ranks' terms, summed by one reduce-scatter."""
    terms = {owner: gradient(owner, block) for owner, block in blocks}
    # Example: rank 1 of 3 has computed the terms in the order 1 0 2, and sends them as 0 1 2.
    flat = torch.cat([terms[owner] for owner in range(comm.size)])
    with purpose("attention: gradients of keys and values"):
        return reduce_scatter_v(flat, comm, sizes)


class Rotation(NamedTuple):
    """A way to bring blocks to this rank, and to bring their gradients to the ranks that own them."""

    blocks: Callable[[Tensor, list[int], Comm], Blocks]
    gradients: Callable[[Gradient, Blocks, list[int], Comm], Tensor]


ROTATIONS = {
    "ring": Rotation(around_ring, ring_gradients),
    "allgather": Rotation(gathered_blocks, gathered_gradients),
}


class _BlockShapes:
    """Shapes of the ranks' blocks of keys and values, as flat tensors.

    Attributes:
        widths: width of keys and of values.
        shapes: (n, 1, length) of the keys of each rank.
        flat: number of elements of each rank's block.
    """

    def __init__(self, k: Tensor, v: Tensor, layout: SequenceLayout) -> None:
        self.widths = (k.shape[-1], v.shape[-1])
        n = k.shape[0]
        self.shapes = [(n, 1, length) for length in layout.sizes]
        # Example: keys (6, 1, 4, 8) and values (6, 1, 4, 8) -> 6 * 4 * (8 + 8) = 384 elements.
        total_width = sum(self.widths)
        self.flat = [prod(shape) * total_width for shape in self.shapes]

    def keys_and_values(self, flat: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """Return views of a flat block as keys and values, each (n, 1, length, width)."""
        shape = self.shapes[owner]
        key_width, value_width = self.widths
        # Example, continued: 6 * 4 * 8 = 192 elements of keys, and 192 of values.
        rows = prod(shape)
        k, v = torch.split_with_sizes(flat, [rows * key_width, rows * value_width])
        return k.view(*shape, key_width), v.view(*shape, value_width)


class RotatedAttention(Function):
    """Attention of a sharded sequence, q, k, v: S -> S, as an autograd function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
        shapes = _BlockShapes(k, v, task.layout)
        ctx.shapes = shapes
        own_block = torch.cat([k.reshape(-1), v.reshape(-1)])
        exact = torch.promote_types(q.dtype, torch.float32)
        rows = q.shape[:-1]
        out = q.new_zeros((*rows, v.shape[-1]), dtype=exact)
        lse = q.new_full(rows, -torch.inf, dtype=exact)
        rotation = ROTATIONS[task.rotation]
        for owner, block in rotation.blocks(own_block, shapes.flat, task.comm):
            keys, values = shapes.keys_and_values(block, owner)
            for tile in tiles(task.layout, task.rank, owner, task.mask):
                tile_q = task.queries(tile, q)
                tile_k = task.keys(tile, keys)
                tile_v = task.keys(tile, values)
                block_out, block_lse = task.kernel.forward(tile_q, tile_k, tile_v, tile)
                tile_out = task.queries(tile, out)
                tile_lse = task.sums(tile, lse)
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
        task: Task = ctx.task
        shapes: _BlockShapes = ctx.shapes
        grad = grad.contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)

        def add_gradients(owner: int, block: Tensor) -> Tensor:
            """Add to `dq`, and return this rank's term of the gradient of a block."""
            block_grad = torch.zeros_like(block, dtype=lse.dtype)
            keys, values = shapes.keys_and_values(block, owner)
            dk, dv = shapes.keys_and_values(block_grad, owner)
            for tile in tiles(task.layout, task.rank, owner, task.mask):
                tile_grad = task.queries(tile, grad)
                tile_q = task.queries(tile, q)
                tile_k = task.keys(tile, keys)
                tile_v = task.keys(tile, values)
                tile_out = task.queries(tile, out)
                tile_lse = task.sums(tile, lse)
                tile_dq, tile_dk, tile_dv = task.kernel.backward(
                    tile_grad, tile_q, tile_k, tile_v, out=tile_out, lse=tile_lse, tile=tile
                )
                task.queries(tile, dq).add_(tile_dq)
                task.keys(tile, dk).add_(tile_dk)
                task.keys(tile, dv).add_(tile_dv)
            return block_grad

        rotation = ROTATIONS[task.rotation]
        # The many functions on tiles are nothing that modes for torch functions need to observe.
        with unwatched_functions():
            blocks = rotation.blocks(own_block, shapes.flat, task.comm)
            own_grad = rotation.gradients(add_gradients, blocks, shapes.flat, task.comm)
        dk, dv = shapes.keys_and_values(own_grad, task.rank)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None


def rotated_attention(q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
    """Return this rank's rows of the attention.

    The shape (batch, heads, local length, width) has the width of values.
    """
    # Example: a batch of 3, and 8 query heads with 2 heads of keys -> the first dim is 6, and the 4
    # query heads that read each head of keys are in the second dim.
    batch, key_heads = k.shape[:2]
    folded = batch * key_heads
    group = q.shape[1] // max(key_heads, 1)
    keys = k.reshape(folded, 1, *k.shape[2:])
    values = v.reshape(folded, 1, *v.shape[2:])
    queries = q.reshape(folded, group, *q.shape[2:]).contiguous()
    with unwatched():
        out: Tensor = apply(RotatedAttention, queries, keys, values, task)
    return out.reshape(*q.shape[:-1], v.shape[-1])
