"""Attention of some queries to one block of keys: the part of the softmax, its log-sum, and both gradients.

Queries are (n, group, length, width) and keys (n, 1, length, width): n counts batch rows and heads of keys, `group`
query heads share a head of keys.  The kernel is one of torch's that gives log-sums, where the device has one for these
tensors; else the same in plain operators, some queries at a time.

May import: _torch, sequence_layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import _torch
from ._torch import Gradients, Mask, Outputs
from .sequence_layout import UNBOUNDED, Tile, TileKind

# Elements of the scores that exist at once in plain operators: 16 MiB of them on CPU, elsewhere 128.
_SCORES, _SCORES_OF_DEVICE = 1 << 22, 1 << 25


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to what was computed before, in place: the online softmax.

    `softmax` over both key sets is a mean of the two outputs (..., queries, width), weighted by the sums of their
    exponentials, whose logarithms are (..., queries); -inf where nothing was read yet.
    """
    total = torch.logaddexp(lse, block_lse)  # sums of exponentials 1 before, 3 here: log 4
    finite = total.masked_fill(total == -torch.inf, 0)  # of queries that read nothing
    weight = (block_lse - finite).exp_().unsqueeze(-1)  # of sums 1 and 3: 3 / 4 here, 1 / 4 for what was there
    out.mul_((lse - finite).exp_().unsqueeze(-1)).addcmul_(block_out.to(out.dtype), weight)
    lse.copy_(total)


class AttentionKernel(NamedTuple):
    """A kernel of attention that gives the log-sums of its rows, and what it takes."""

    # output and log-sums of queries, keys and values; causal, mask (added to the scores) and scale follow
    forward: Callable[..., Outputs]
    backward: Callable[..., Gradients]
    multiple: int = 1  # what the widths of keys and values are multiples of
    equal_widths: bool = False  # whether these two are equal
    masks: bool = True  # whether something may be added to the scores
    groups: bool = False  # whether query heads may share a head of keys
    name: str = ""  # under which torch says whether it runs for a dtype on a device; "" for always

    def takes(self, q: Tensor, v: Tensor, masked: bool) -> bool:
        """Whether it computes such tensors."""
        widths = q.shape[-1], v.shape[-1]
        fits = all(width % self.multiple == 0 for width in widths) and (self.masks or not masked)
        if not fits or (self.equal_widths and widths[0] != widths[1]):
            return False
        samples = (x.new_empty(1, 1, 16, x.shape[-1], requires_grad=q.requires_grad) for x in (q, v))
        return not self.name or _torch.can_use(self.name, *samples)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask, scale: float) -> Outputs:
    """Output and log-sum-exp in plain operators, for any dtype, widths and mask."""
    outs, sums = [], []
    for _, scores in _scores(q, k, causal, mask, scale):
        lse = scores.logsumexp(-1)
        p = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()
        outs.append(p.to(v.dtype) @ v)
        sums.append(lse)
    return torch.cat(outs, -2), torch.cat(sums, -1)


def plain_attention_backward(*tensors: Tensor, causal: bool, mask: Mask, scale: float) -> Gradients:
    """Gradients of `plain_attention`: with the log-sum of a row, `exp(scores - lse)` is its softmax."""
    grad, q, k, v, out, lse = tensors
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grad * out).sum(-1, keepdim=True)
    for rows, scores in _scores(q, k, causal, mask, scale):
        p = scores.sub_(lse[..., rows, None]).exp_().to(q.dtype)
        dv += p.transpose(-1, -2) @ grad[..., rows, :]
        ds = p * (grad[..., rows, :] @ v.transpose(-1, -2) - delta[..., rows, :])
        dq[..., rows, :] = ds @ k * scale
        dk += ds.transpose(-1, -2) @ q[..., rows, :] * scale
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Mask, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Some queries after others: which, and their scores, in float32 or more."""
    limit = _SCORES if q.is_cpu else _SCORES_OF_DEVICE
    step = max(1, limit // max(1, q.shape[0] * q.shape[1] * k.shape[-2]))  # 6 x 4 heads, 8192 keys: 21 queries
    for start in range(0, q.shape[-2], step):
        rows = slice(start, start + step)
        scores = (q[..., rows, :] @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
        if mask is not None:
            scores.add_(mask[..., rows, :])
        if causal:
            scores.masked_fill_(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu_(1 + start), -torch.inf)
        yield rows, scores


_PLAIN = AttentionKernel(plain_attention, plain_attention_backward)
# By type of device, the one that is preferred first.
_KERNELS = {
    "cpu": [AttentionKernel(_torch.flash_attention, _torch.flash_attention_backward, equal_widths=True)],
    "cuda": [
        AttentionKernel(
            _torch.cuda_flash_attention, _torch.cuda_flash_attention_backward, 8, True, False, True, "flash"
        ),
        AttentionKernel(_torch.efficient_attention, _torch.efficient_attention_backward, 8, name="efficient"),
    ],
}


def kernel_of(q: Tensor, v: Tensor, *, masked: bool) -> AttentionKernel:
    """The kernel for queries and values, the same on all ranks: it follows from device, dtype and widths."""
    kernels: list[AttentionKernel] = [*_KERNELS.get(q.device.type, []), _PLAIN]
    return next(kernel for kernel in kernels if kernel.takes(q, v, masked))


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """Attention inside a tile."""

    scale: float  # factor of the scores
    reach: tuple[int, int]  # keys before and behind a query that it may read, for tiles at a window's edge
    attn_mask: Mask  # (n or 1, group or 1, queries of the rank, all keys), added to the scores; None for none
    unmasked: AttentionKernel  # the kernel of tiles without a mask
    masked: AttentionKernel  # that of tiles to whose scores something is added

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Outputs:
        """Output and log-sum-exp of a tile's queries: (n, group, queries, width) and (n, group, queries)."""
        kernel, causal, mask = self._computed_by(q, k, tile)
        if not kernel.groups:
            k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        out, lse = kernel.forward(q, k, v, causal, mask, self.scale)
        if self.attn_mask is not None and mask is not None:  # of a row without a key kernels give other numbers
            empty = mask.amax(-1) == -torch.inf
            out, lse = out.masked_fill(empty.unsqueeze(-1), 0), lse.masked_fill(empty, -torch.inf)
        return out, lse

    def backward(  # noqa: PLR0913  # what the gradient of attention depends on
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> Gradients:
        """Gradients of a tile's queries, keys and values; `out` and `lse` are those of all keys."""
        kernel, causal, mask = self._computed_by(q, k, tile)
        keys, values = (x if kernel.groups else x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        dq, *grads = kernel.backward(grad, q, keys, values, out, lse, causal=causal, mask=mask, scale=self.scale)
        dk, dv = (x if x.shape == like.shape else x.sum(1, keepdim=True) for x, like in zip(grads, (k, v), strict=True))
        return dq, dk, dv

    def _computed_by(self, q: Tensor, k: Tensor, tile: Tile) -> tuple[AttentionKernel, bool, Mask]:
        """The kernel of a tile, whether it masks the tile as a causal one, and what is added to the scores."""
        given, rows, columns = self.attn_mask, q.shape[-2], k.shape[-2]
        if given is None and tile.kind is not TileKind.BAND:
            return self.unmasked, tile.kind is TileKind.CAUSAL, None
        if given is not None:
            given = given[..., tile.queries, tile.first_key : tile.first_key + columns]
            if tile.row is not None and given.shape[0] > 1:
                size = q.shape[0]
                given = given[tile.row * size : (tile.row + 1) * size]  # 2 heads of keys, batch row 1: 2:4
        if tile.kind is TileKind.FULL:
            return self.masked, False, given
        left, right = self.reach if tile.kind is TileKind.BAND else (UNBOUNDED, 0)
        ahead = torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device).unsqueeze(-1) - tile.offset
        band = torch.zeros(rows, columns, dtype=q.dtype, device=q.device)
        band.masked_fill_((ahead > right) | (ahead < -left), -torch.inf)
        return self.masked, False, band.expand(1, 1, -1, -1) if given is None else given + band
