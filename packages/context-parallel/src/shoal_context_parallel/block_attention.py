"""Attention of this rank's queries to the keys and values of all ranks, block by block.

q, k, v: S(sequence) -> S(sequence). Only the rank's own tensors are saved for backward; blocks are
sent again in backward.

A block is one flat tensor: keys, then values, of one rank. Blocks go around a ring, or are
gathered; their gradients go back likewise. Each generator of blocks yields the rank's own block
first and starts the next message before it yields, so that a block is in flight while the previous
block is computed.

Each block contributes its part of the softmax, its log-sum, and both gradients. Queries are (n,
group, length, width) and keys (n, 1, length, width): n counts batch rows and heads of keys, `group`
query heads share a head of keys. The kernel is one of torch's kernels that return log-sums, if the
device has one for these tensors; otherwise plain operators compute the same, some queries at a
time.

May import: _torch, sequence_layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor.internal import apply, first_order_only, unwatched
from shoal_mesh import Comm, all_gather_v, all_to_all_v, purpose, reduce_scatter_v
from shoal_mesh.internal import Pending

from . import _torch
from ._torch import Gradients, Mask, Outputs
from .sequence_layout import UNBOUNDED, AttentionMask, SequenceLayout, Tile, TileKind, tiles

# Elements of the scores that exist at once in plain operators: 16 MiB of them on CPU, elsewhere
# 128.
_SCORES = 1 << 22
_SCORES_OF_DEVICE = 1 << 25


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge the attention of a block into the previous result, in place: the online softmax.

    `softmax` over both key sets is a mean of the two outputs (..., queries, width), weighted by the
    sums of their exponentials. The logarithms of these sums are (..., queries); -inf for queries
    that have not read a key yet.
    """
    # sums of exponentials 1 before, 3 here: log 4
    total = torch.logaddexp(lse, block_lse)
    finite = total.masked_fill(total == -torch.inf, 0)  # of queries that read nothing
    # of sums 1 and 3: 3 / 4 here, 1 / 4 for what was there
    weight = (block_lse - finite).exp_().unsqueeze(-1)
    out.mul_((lse - finite).exp_().unsqueeze(-1)).addcmul_(block_out.to(out.dtype), weight)
    lse.copy_(total)


class AttentionKernel(NamedTuple):
    """A kernel of attention that returns the log-sums of its rows, and its limits."""

    # output and log-sums of queries, keys and values; causal, mask (added to the scores) and scale
    # follow
    forward: Callable[..., Outputs]
    backward: Callable[..., Gradients]
    # what the widths of keys and values are multiples of
    multiple: int = 1
    equal_widths: bool = False  # whether these two are equal
    # whether something may be added to the scores
    masks: bool = True
    # whether query heads may share a head of keys
    groups: bool = False
    # under which torch says whether it runs for a dtype on a device; "" for always
    name: str = ""

    def takes(self, q: Tensor, v: Tensor, masked: bool) -> bool:
        """Tell whether the kernel supports these tensors."""
        widths = q.shape[-1], v.shape[-1]
        fits = all(width % self.multiple == 0 for width in widths) and (self.masks or not masked)
        if not fits or (self.equal_widths and widths[0] != widths[1]):
            return False
        samples = (
            x.new_empty(1, 1, 16, x.shape[-1], requires_grad=q.requires_grad) for x in (q, v)
        )
        return not self.name or _torch.can_use(self.name, *samples)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask, scale: float
) -> Outputs:
    """Compute output and log-sum-exp in plain operators, for any dtype, widths and mask."""
    outs = []
    sums = []
    for _, scores in _scores(q, k, causal, mask, scale=scale):
        lse = scores.logsumexp(-1)
        p = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()
        outs.append(p.to(v.dtype) @ v)
        sums.append(lse)
    return torch.cat(outs, -2), torch.cat(sums, -1)


def plain_attention_backward(*tensors: Tensor, causal: bool, mask: Mask, scale: float) -> Gradients:
    """Compute the gradients of `plain_attention`: `exp(scores - lse)` is the softmax of a row."""
    grad, q, k, v, out, lse = tensors
    dq = torch.empty_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    delta = (grad * out).sum(-1, keepdim=True)
    for rows, scores in _scores(q, k, causal, mask, scale=scale):
        p = scores.sub_(lse[..., rows, None]).exp_().to(q.dtype)
        dv += p.transpose(-1, -2) @ grad[..., rows, :]
        ds = p * (grad[..., rows, :] @ v.transpose(-1, -2) - delta[..., rows, :])
        dq[..., rows, :] = ds @ k * scale
        dk += ds.transpose(-1, -2) @ q[..., rows, :] * scale
    return dq, dk, dv


def _scores(
    q: Tensor, k: Tensor, causal: bool, mask: Mask, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of queries and their scores, in float32 or more."""
    limit = _SCORES if q.is_cpu else _SCORES_OF_DEVICE
    # 6 x 4 heads, 8192 keys: 21 queries
    step = max(1, limit // max(1, q.shape[0] * q.shape[1] * k.shape[-2]))
    for start in range(0, q.shape[-2], step):
        rows = slice(start, start + step)
        scores = (q[..., rows, :] @ k.transpose(-1, -2)).to(
            torch.promote_types(q.dtype, torch.float32)
        ) * scale
        if mask is not None:
            scores.add_(mask[..., rows, :])
        if causal:
            scores.masked_fill_(
                scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu_(1 + start), -torch.inf
            )
        yield rows, scores


_PLAIN = AttentionKernel(plain_attention, plain_attention_backward)
# By type of device, the one that is preferred first.
_KERNELS = {
    "cpu": [
        AttentionKernel(_torch.flash_attention, _torch.flash_attention_backward, equal_widths=True)
    ],
    "cuda": [
        AttentionKernel(
            _torch.cuda_flash_attention,
            _torch.cuda_flash_attention_backward,
            8,
            True,
            masks=False,
            groups=True,
            name="flash",
        ),
        AttentionKernel(
            _torch.efficient_attention, _torch.efficient_attention_backward, 8, name="efficient"
        ),
    ],
}


def kernel_of(q: Tensor, v: Tensor, *, masked: bool) -> AttentionKernel:
    """Return the kernel for queries and values, the same on all ranks.

    The choice depends only on device, dtype and widths.
    """
    kernels: list[AttentionKernel] = [*_KERNELS.get(q.device.type, []), _PLAIN]
    return next(kernel for kernel in kernels if kernel.takes(q, v, masked))


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """Attention inside a tile."""

    scale: float  # factor of the scores
    # keys before and behind a query that it may read, for tiles at a window's edge
    reach: tuple[int, int]
    # (n or 1, group or 1, queries of the rank, all keys), added to the scores; None for none
    attn_mask: Mask
    unmasked: AttentionKernel  # the kernel of tiles without a mask
    # that of tiles to whose scores something is added
    masked: AttentionKernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Outputs:
        """Return output and log-sum-exp of a tile's queries.

        Their shapes are (n, group, queries, width) and (n, group, queries).
        """
        kernel, causal, mask = self._computed_by(q, k, tile)
        if not kernel.groups:
            k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        out, lse = kernel.forward(q, k, v, causal, mask, self.scale)
        # of a row without a key kernels give other numbers
        if self.attn_mask is not None and mask is not None:
            empty = mask.amax(-1) == -torch.inf
            out, lse = out.masked_fill(empty.unsqueeze(-1), 0), lse.masked_fill(empty, -torch.inf)
        return out, lse

    def backward(  # noqa: PLR0913  # what the gradient of attention depends on
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> Gradients:
        """Return the gradients of a tile's queries, keys and values.

        `out` and `lse` are the results over all keys.
        """
        kernel, causal, mask = self._computed_by(q, k, tile)
        keys, values = (x if kernel.groups else x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        dq, *grads = kernel.backward(
            grad, q, keys, values, out, lse, causal=causal, mask=mask, scale=self.scale
        )
        dk, dv = (
            x if x.shape == like.shape else x.sum(1, keepdim=True)
            for x, like in zip(grads, (k, v), strict=True)
        )
        return dq, dk, dv

    def _computed_by(self, q: Tensor, k: Tensor, tile: Tile) -> tuple[AttentionKernel, bool, Mask]:
        """Return a tile's kernel, whether it masks causally, and the mask added to the scores."""
        given = self.attn_mask
        rows = q.shape[-2]
        columns = k.shape[-2]
        if given is None and tile.kind is not TileKind.BAND:
            return self.unmasked, tile.kind is TileKind.CAUSAL, None
        if given is not None:
            given = given[..., tile.queries, tile.first_key : tile.first_key + columns]
            if tile.row is not None and given.shape[0] > 1:
                size = q.shape[0]
                # 2 heads of keys, batch row 1: 2:4
                given = given[tile.row * size : (tile.row + 1) * size]
        if tile.kind is TileKind.FULL:
            return self.masked, False, given
        left, right = self.reach if tile.kind is TileKind.BAND else (UNBOUNDED, 0)
        ahead = (
            torch.arange(columns, device=q.device)
            - torch.arange(rows, device=q.device).unsqueeze(-1)
            - tile.offset
        )
        band = torch.zeros(rows, columns, dtype=q.dtype, device=q.device)
        band.masked_fill_((ahead > right) | (ahead < -left), -torch.inf)
        return self.masked, False, band.expand(1, 1, -1, -1) if given is None else given + band


@dataclass(frozen=True, slots=True)
class Task:
    """The settings that all blocks of one attention share."""

    layout: SequenceLayout  # positions of each rank
    # the axis; where the layout has one rank, this one holds the whole sequence
    comm: Comm
    mask: AttentionMask  # which keys a query reads
    kernel: BlockKernel  # attention inside a tile
    # "ring", also of one rank, or "allgather"
    rotation: str
    # number of batch rows; the first dim of folded tensors is `batch * heads of keys`
    batch: int

    @property
    def rank(self) -> int:
        """This rank's place in the layout."""
        return self.comm.rank if self.layout.ranks > 1 else 0

    def rows(self, tile: Tile, folded: Tensor) -> Tensor:
        """Return the rows of a folded tensor that belong to the batch row of a tile."""
        if tile.row is None:
            return folded
        # 6 rows of a batch of 3: 2 heads of keys each
        heads = folded.shape[0] // self.batch
        # batch row 1 of 3, 2 heads each: 2:4
        return folded[tile.row * heads : (tile.row + 1) * heads]


Blocks = Iterator[tuple[int, Tensor]]  # whose block, and the block
# of whose block: the summand of this rank's queries
Gradient = Callable[[int, Tensor], Tensor]


def around_ring(block: Tensor, sizes: list[int], comm: Comm) -> Blocks:
    """Yield each rank's block in turn, starting with this rank's block.

    Two blocks, of `sizes` elements, are in memory at a time.
    """
    # of three ranks, rank 1 yields the blocks of 1 0 2; alone, the one of 0
    owner = comm.rank % len(sizes)
    for step in range(len(sizes)):
        last = step == len(sizes) - 1
        pending = None if last else _to_next(block, sizes, owner, comm, what="keys and values")
        yield owner, block
        if pending is not None:
            # of 3 ranks, after the block of 0 that of 2
            block = pending.wait()
            owner = (owner - 1) % comm.size


def ring_gradients(gradient: Gradient, blocks: Blocks, sizes: list[int], comm: Comm) -> Tensor:
    """Return the gradient of this rank's block, as a sum that travels around the ring.

    The sum follows the block, and returns to this rank after the last step.
    """
    arriving: Pending | None = None
    for owner, block in blocks:
        summed = gradient(owner, block)
        if len(sizes) == 1:
            return summed
        if arriving is not None:
            summed += arriving.wait()
        arriving = _to_next(summed, sizes, owner, comm, what="gradients of keys and values")
    assert arriving is not None, "an axis has a rank"
    return arriving.wait()


def _to_next(block: Tensor, sizes: list[int], owner: int, comm: Comm, what: str) -> Pending:
    """Send a block to the next rank, and receive a block from the previous rank.

    The received block belongs to the owner before `owner`.
    """
    send = [0] * comm.size
    receive = [0] * comm.size
    send[(comm.rank + 1) % comm.size] = block.numel()
    # rank 1 sends block 1 to 2, gets 0 from 0
    receive[(comm.rank - 1) % comm.size] = sizes[(owner - 1) % comm.size]
    with purpose(f"ring attention: {what}"):
        return all_to_all_v(block, comm, send, receive, async_op=True)


def gathered(block: Tensor, sizes: list[int], comm: Comm) -> Blocks:
    """Yield each rank's block, in the order of `around_ring`, all from one all-gather."""
    with purpose("attention: gather keys and values"):
        pending = all_gather_v(block, comm, sizes, async_op=True)
    yield comm.rank, block
    blocks = torch.split_with_sizes(pending.wait(), sizes)
    for step in range(1, comm.size):
        # rank 1 of 3: after its own those of 0 and 2
        owner = (comm.rank - step) % comm.size
        yield owner, blocks[owner]


def gathered_gradients(gradient: Gradient, blocks: Blocks, sizes: list[int], comm: Comm) -> Tensor:
    """Return the gradient of this rank's block: the ranks' terms, summed by one reduce-scatter."""
    summands = {owner: gradient(owner, block) for owner, block in blocks}
    # rank 1 of 3 computed 1, 0, 2; now 0, 1, 2
    flat = torch.cat([summands[owner] for owner in range(comm.size)])
    with purpose("attention: gradients of keys and values"):
        return reduce_scatter_v(flat, comm, sizes)


ROTATIONS = {"ring": (around_ring, ring_gradients), "allgather": (gathered, gathered_gradients)}
"""By method: how blocks come, and how their gradients go home."""


class _Sizes:
    """Shapes of the ranks' blocks of keys and values, as flat tensors."""

    def __init__(self, k: Tensor, v: Tensor, layout: SequenceLayout) -> None:
        self.widths = k.shape[-1], v.shape[-1]
        self.shapes = [(k.shape[0], 1, length) for length in layout.sizes]
        # 6 * 4 * (8 + 8) = 384
        self.flat = [prod(shape) * sum(self.widths) for shape in self.shapes]

    def keys_and_values(self, flat: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """Return views of a flat block as keys and values, each (n, 1, length, width)."""
        shape = self.shapes[owner]
        # 6 * 4 * 8 = 192, twice
        k, v = torch.split_with_sizes(flat, [prod(shape) * width for width in self.widths])
        return k.view(*shape, self.widths[0]), v.view(*shape, self.widths[1])


class _RotatedAttention(Function):
    """Attention of a sharded sequence, q, k, v: S -> S, as an autograd function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
        sizes = _Sizes(k, v, task.layout)
        ctx.sizes = sizes
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
    """Return this rank's rows of the attention.

    The shape (batch, heads, local length, width) has the width of values.
    """
    # 8 heads with 2 of keys in a batch of 3: 6 heads of keys in the first dim, the 4 heads that
    # read each in the next.
    folded = k.shape[0] * k.shape[1]  # batch 3, 2 heads of keys: 6
    keys, values = (x.reshape(folded, 1, *x.shape[2:]) for x in (k, v))
    queries = q.reshape(folded, q.shape[1] // max(k.shape[1], 1), *q.shape[2:]).contiguous()
    with unwatched():
        out: Tensor = apply(_RotatedAttention, queries, keys, values, task)
    return out.reshape(*q.shape[:-1], v.shape[-1])
