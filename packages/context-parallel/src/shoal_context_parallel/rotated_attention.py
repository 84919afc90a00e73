"""Attention of this rank's queries to the keys and values of all ranks, block by block.

q, k, v: S(sequence) -> S(sequence).  What is saved for backward is the rank's own; blocks come again in backward.

A block is one flat tensor: keys, then values, of one rank.  Blocks go around a ring, or are gathered; their gradients
go back likewise.  Each generator of blocks yields the rank's own first and starts the next message before it does, so
that blocks travel while the one before is computed.

May import: block_attention, sequence_layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor.internal import apply, first_order_only, unwatched
from shoal_mesh import Comm, all_gather_v, all_to_all_v, purpose, reduce_scatter_v
from shoal_mesh.internal import Pending

from .block_attention import BlockKernel, merge
from .sequence_layout import AttentionMask, SequenceLayout, Tile, tiles


@dataclass(frozen=True, slots=True)
class Task:
    """What all blocks of one attention share."""

    layout: SequenceLayout  # positions of each rank
    comm: Comm  # the axis; where the layout has one rank, this one holds the whole sequence
    mask: AttentionMask  # which keys a query reads
    kernel: BlockKernel  # attention inside a tile
    rotation: str  # "ring", also of one rank, or "allgather"
    batch: int  # number of batch rows; the first dim of folded tensors is `batch * heads of keys`

    @property
    def rank(self) -> int:
        """This rank's place in the layout."""
        return self.comm.rank if self.layout.ranks > 1 else 0

    def rows(self, tile: Tile, folded: Tensor) -> Tensor:
        """The batch row of a tile, of a folded tensor."""
        if tile.row is None:
            return folded
        heads = folded.shape[0] // self.batch  # 6 rows of a batch of 3: 2 heads of keys each
        return folded[tile.row * heads : (tile.row + 1) * heads]  # batch row 1 of 3, 2 heads each: 2:4


Blocks = Iterator[tuple[int, Tensor]]  # whose block, and the block
Gradient = Callable[[int, Tensor], Tensor]  # of whose block: the summand of this rank's queries


def around_ring(block: Tensor, sizes: list[int], comm: Comm) -> Blocks:
    """Each rank's block in turn, from this rank's on; two, of `sizes` elements, are in memory at a time."""
    owner = comm.rank % len(sizes)  # of three ranks, rank 1 yields the blocks of 1 0 2; alone, the one of 0
    for step in range(len(sizes)):
        last = step == len(sizes) - 1
        pending = None if last else _to_next(block, sizes, owner, comm, "keys and values")
        yield owner, block
        if pending is not None:
            block, owner = pending.wait(), (owner - 1) % comm.size  # of 3 ranks, after the block of 0 that of 2


def ring_gradients(gradient: Gradient, blocks: Blocks, sizes: list[int], comm: Comm) -> Tensor:
    """The gradient of this rank's block: a sum that travels behind the blocks, and comes home after the last step."""
    arriving: Pending | None = None
    for owner, block in blocks:
        summed = gradient(owner, block)
        if len(sizes) == 1:
            return summed
        if arriving is not None:
            summed += arriving.wait()
        arriving = _to_next(summed, sizes, owner, comm, "gradients of keys and values")
    assert arriving is not None, "an axis has a rank"
    return arriving.wait()


def _to_next(block: Tensor, sizes: list[int], owner: int, comm: Comm, what: str) -> Pending:
    """Send a block to the next rank, and receive the one of the rank before, which is of the owner before."""
    send, receive = [0] * comm.size, [0] * comm.size
    send[(comm.rank + 1) % comm.size] = block.numel()
    receive[(comm.rank - 1) % comm.size] = sizes[(owner - 1) % comm.size]  # rank 1 sends block 1 to 2, gets 0 from 0
    with purpose(f"ring attention: {what}"):
        return all_to_all_v(block, comm, send, receive, async_op=True)


def gathered(block: Tensor, sizes: list[int], comm: Comm) -> Blocks:
    """Each rank's block, in the order of `around_ring`, all from one all-gather."""
    with purpose("attention: gather keys and values"):
        pending = all_gather_v(block, comm, sizes, async_op=True)
    yield comm.rank, block
    blocks = torch.split_with_sizes(pending.wait(), sizes)
    for step in range(1, comm.size):
        owner = (comm.rank - step) % comm.size  # rank 1 of 3: after its own those of 0 and 2
        yield owner, blocks[owner]


def gathered_gradients(gradient: Gradient, blocks: Blocks, sizes: list[int], comm: Comm) -> Tensor:
    """The gradient of this rank's block: the ranks' summands, by one reduce-scatter."""
    summands = {owner: gradient(owner, block) for owner, block in blocks}
    flat = torch.cat([summands[owner] for owner in range(comm.size)])  # rank 1 of 3 computed 1, 0, 2; now 0, 1, 2
    with purpose("attention: gradients of keys and values"):
        return reduce_scatter_v(flat, comm, sizes)


ROTATIONS = {"ring": (around_ring, ring_gradients), "allgather": (gathered, gathered_gradients)}
"""By method: how blocks come, and how their gradients go home."""


class _Sizes:
    """Shapes of the ranks' blocks of keys and values, as flat tensors."""

    def __init__(self, k: Tensor, v: Tensor, layout: SequenceLayout) -> None:
        self.widths = k.shape[-1], v.shape[-1]
        self.shapes = [(k.shape[0], 1, length) for length in layout.sizes]
        self.flat = [prod(shape) * sum(self.widths) for shape in self.shapes]  # 6 * 4 * (8 + 8) = 384

    def keys_and_values(self, flat: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """Views of a flat block: (n, 1, length, width) each."""
        shape = self.shapes[owner]
        k, v = torch.split_with_sizes(flat, [prod(shape) * width for width in self.widths])  # 6 * 4 * 8 = 192, twice
        return k.view(*shape, self.widths[0]), v.view(*shape, self.widths[1])


class _RotatedAttention(Function):
    """q, k, v: S -> S."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
        sizes = ctx.sizes = _Sizes(k, v, task.layout)
        own_block = torch.cat([k.reshape(-1), v.reshape(-1)])
        exact = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=exact)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=exact)
        for owner, block in ROTATIONS[task.rotation][0](own_block, sizes.flat, task.comm):
            keys, values = sizes.keys_and_values(block, owner)
            for tile in tiles(task.layout, task.rank, owner, task.mask):
                own, into = (task.rows(tile, x)[..., tile.queries, :] for x in (q, out))
                block_k, block_v = (task.rows(tile, x)[..., tile.keys, :] for x in (keys, values))
                found, total = task.kernel.forward(own, block_k, block_v, tile)
                merge(into, task.rows(tile, lse)[..., tile.queries], found, total)
        result = out.to(q.dtype)
        # A query that reads nothing has the output 0, and no gradient: exp(-inf - 0).
        ctx.save_for_backward(q, own_block, result, lse.masked_fill_(lse == -torch.inf, 0))
        ctx.task = task
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only("attention of a sharded sequence has first derivatives only")
        q, own_block, out, lse = ctx.saved_tensors
        task: Task = ctx.task
        sizes: _Sizes = ctx.sizes
        grad = grad.contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)

        def gradient(owner: int, block: Tensor) -> Tensor:
            flat = torch.zeros_like(block, dtype=lse.dtype)
            keys, values = sizes.keys_and_values(block, owner)
            into = sizes.keys_and_values(flat, owner)
            for tile in tiles(task.layout, task.rank, owner, task.mask):
                g, rows, o = (task.rows(tile, x)[..., tile.queries, :] for x in (grad, q, out))
                block_k, block_v = (task.rows(tile, x)[..., tile.keys, :] for x in (keys, values))
                sums = task.rows(tile, lse)[..., tile.queries]
                found = task.kernel.backward(g, rows, block_k, block_v, o, sums, tile)
                task.rows(tile, dq)[..., tile.queries, :] += found[0]
                for target, part in zip(into, found[1:], strict=True):
                    task.rows(tile, target)[..., tile.keys, :] += part
            return flat

        blocks, gradients = ROTATIONS[task.rotation]
        own = gradients(gradient, blocks(own_block, sizes.flat, task.comm), sizes.flat, task.comm)
        dk, dv = sizes.keys_and_values(own, task.rank)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None


def rotated_attention(q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
    """The rank's rows of the attention: (batch, heads, local length, width) to that of values."""
    # 8 heads with 2 of keys in a batch of 3: 6 heads of keys in the first dim, the 4 heads that read each in the next.
    folded = k.shape[0] * k.shape[1]  # batch 3, 2 heads of keys: 6
    keys, values = (x.reshape(folded, 1, *x.shape[2:]) for x in (k, v))
    queries = q.reshape(folded, q.shape[1] // max(k.shape[1], 1), *q.shape[2:]).contiguous()
    with unwatched():
        out: Tensor = apply(_RotatedAttention, queries, keys, values, task)
    return out.reshape(*q.shape[:-1], v.shape[-1])
