"""Attention of some queries to one block of keys: the part of the softmax, its log-sum, and both gradients.

Queries are (n, group, length, width) and keys (n, 1, length, width): n counts batch rows and heads of keys, `group`
query heads share a head of keys.  On CPU torch's own flash kernel runs where it can; elsewhere the same in plain
operators, some queries at a time.

May import: _torch, attention_mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal_mesh.internal import dataclass

from ._torch import flash_attention, flash_attention_backward
from .attention_mask import Tile, TileKind

_SCORES = 1 << 22  # elements of the scores that exist at once where no fused kernel runs


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to what was computed before, in place: the online softmax.

    `softmax` over both key sets is a mean of the two outputs, weighted by the sums of their exponentials.

    Args:
        out: (..., queries, width), so far.
        lse: (..., queries), log-sums so far; -inf where nothing was read yet.
        block_out: of the block.
        block_lse: of the block.
    """
    total = torch.logaddexp(lse, block_lse)
    finite = total.masked_fill(total == -torch.inf, 0)  # of queries that read nothing
    weight = (block_lse - finite).exp_().unsqueeze(-1)
    out.mul_((lse - finite).exp_().unsqueeze(-1)).addcmul_(block_out.to(out.dtype), weight)
    lse.copy_(total)


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """Attention inside a tile.

    Attributes:
        scale: factor of the scores.
        window: (left, right) reach of queries, for tiles at a window's edge.
        attn_mask: (n or 1, group or 1, queries of the rank, all keys), added to the scores; None for none.
    """

    scale: float
    window: tuple[int | None, int | None]
    attn_mask: Tensor | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a tile's queries: (n, group, queries, width) and (n, group, queries)."""
        k, v = _grouped(k, q), _grouped(v, q)
        mask = self._mask(q, k, tile, fused=_fused(q, v))
        if not _fused(q, v):
            parts = [self._rows(q[..., s, :], k, v, _rows_of(mask, s)) for s in _chunks(q, k)]
            return torch.cat([o for o, _ in parts], -2), torch.cat([lse for _, lse in parts], -1)
        out, lse = flash_attention(q, k, v, tile.kind is TileKind.CAUSAL and mask is None, mask, self.scale)
        if self.attn_mask is not None and mask is not None:  # the kernel's log-sum of a row without a key is 0
            lse = lse.masked_fill(mask.amax(-1) == -torch.inf, -torch.inf)
        return out, lse

    def backward(  # noqa: PLR0913  # what the gradient of attention depends on
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of a tile's queries, keys and values; `out` and `lse` are those of all keys.

        With the log-sum over all keys, `exp(scores - lse)` is the tile's part of the full softmax.
        """
        heads = k, v
        k, v = _grouped(k, q), _grouped(v, q)
        mask = self._mask(q, k, tile, fused=_fused(q, v))
        if _fused(q, v):
            causal = tile.kind is TileKind.CAUSAL and mask is None
            dq, dk, dv = flash_attention_backward(grad, q, k, v, out, lse, causal, mask, self.scale)
        else:
            dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
            delta = (grad * out).sum(-1, keepdim=True)
            for s in _chunks(q, k):
                rows = q[..., s, :]
                p = (self._scores(rows, k, _rows_of(mask, s)) - lse[..., s, None]).exp_().to(q.dtype)
                dv += p.transpose(-1, -2) @ grad[..., s, :]
                ds = p * (grad[..., s, :] @ v.transpose(-1, -2) - delta[..., s, :])
                dq[..., s, :] = ds @ k * self.scale
                dk += ds.transpose(-1, -2) @ rows * self.scale
        return dq, _summed(dk, heads[0]), _summed(dv, heads[1])

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, mask)
        lse = scores.logsumexp(-1)
        p = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()
        return p.to(v.dtype) @ v, lse

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * self.scale
        return scores if mask is None else scores.add_(mask)

    def _mask(self, q: Tensor, k: Tensor, tile: Tile, *, fused: bool) -> Tensor | None:
        """What is added to a tile's scores; None where the kernel needs none."""
        rows, columns = q.shape[-2], k.shape[-2]
        given = self.attn_mask
        if given is not None:
            given = given[..., tile.queries, tile.first_key : tile.first_key + columns]
            if tile.row is not None and given.shape[0] > 1:
                size = q.shape[0]
                given = given[tile.row * size : (tile.row + 1) * size]
        if tile.kind is TileKind.FULL or (tile.kind is TileKind.CAUSAL and given is None and fused):
            return given
        left, right = self.window if tile.kind is TileKind.BAND else (None, 0)
        ahead = torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device).unsqueeze(-1) - tile.offset
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if right is not None:
            hidden |= ahead > right
        if left is not None:
            hidden |= ahead < -left
        band = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
        return band.expand(1, 1, -1, -1) if given is None else given + band


def _fused(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _grouped(keys: Tensor, q: Tensor) -> Tensor:
    return keys.expand(-1, q.shape[1], -1, -1)


def _summed(grad: Tensor, keys: Tensor) -> Tensor:
    """The gradient of keys that a group of query heads shares."""
    return grad if grad.shape[1] == keys.shape[1] else grad.sum(1, keepdim=True)


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    step = max(1, _SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[-2]))
    for start in range(0, q.shape[-2], step):
        yield slice(start, start + step)


def _rows_of(mask: Tensor | None, rows: slice) -> Tensor | None:
    return None if mask is None else mask[..., rows, :]
