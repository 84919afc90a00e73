"""Kernels of attention, and attention of some queries to some keys (a tile).

Tensors are folded to four dims: queries are (n, group, length, width) and keys (n, 1, length,
width). n is the number of batch rows times the number of heads of keys, and `group` query heads
share a head of keys. Example: 3 batch rows, 8 query heads and 2 heads of keys -> n is 3 * 2 = 6,
and a group is 8 / 2 = 4 query heads.

The kernel is one of torch's kernels that return log-sums, if the device has one for these tensors.
Otherwise plain operators compute the same results, for some queries at a time.

May import: tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._torch import Gradients, Mask, Outputs
from ..sequence_layout import UNBOUNDED
from .tiles import Tile, TileKind

# Most elements of the scores that plain operators compute at once. In float32 they are 16 MiB on a
# CPU, and 128 MiB on other devices.
_MOST_SCORES_ON_CPU = 1 << 22
_MOST_SCORES_ON_DEVICE = 1 << 25


class AttentionKernel(NamedTuple):
    """A kernel of attention that returns the log-sums of its rows, and its limits.

    Attributes:
        forward: function of queries, keys, values, causal, mask (added to the scores) and scale;
            returns output and log-sums.
        backward: function that returns the gradients, see `_torch`.
        width_multiple: the widths of keys and values must be multiples of this number.
        needs_equal_widths: whether the two widths must be equal.
        adds_mask: whether a mask can be added to the scores.
        shares_key_heads: whether query heads may share a head of keys, (n, 1, length, width).
        name_in_torch: the name by which `_torch.can_use` tells whether torch runs the kernel for a
            dtype on a device; "" for a kernel that torch always runs.
    """

    forward: Callable[..., Outputs]
    backward: Callable[..., Gradients]
    width_multiple: int = 1
    needs_equal_widths: bool = False
    adds_mask: bool = True
    shares_key_heads: bool = False
    name_in_torch: str = ""

    def takes(self, q: Tensor, v: Tensor, masked: bool) -> bool:
        """Tell whether the kernel supports queries and values, and a mask if `masked`."""
        if masked and not self.adds_mask:
            return False
        # Queries and keys have one width.
        key_width = q.shape[-1]
        value_width = v.shape[-1]
        if key_width % self.width_multiple or value_width % self.width_multiple:
            return False
        if self.needs_equal_widths and key_width != value_width:
            return False
        if not self.name_in_torch:
            return True
        requires_grad = q.requires_grad
        # torch decides by dtype, device and widths, so samples of 16 positions are enough.
        sample_query = q.new_empty(1, 1, 16, key_width, requires_grad=requires_grad)
        sample_value = v.new_empty(1, 1, 16, value_width, requires_grad=requires_grad)
        return _torch.can_use(self.name_in_torch, sample_query, sample_value)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask, scale: float
) -> Outputs:
    """Compute output and log-sum-exp in plain operators, for any dtype, widths and mask."""
    outs = []
    log_sums = []
    for _, scores in _scores(q, k, causal, mask, scale=scale):
        lse = scores.logsumexp(-1)
        # 0 for queries that read no key, whose softmax is exp(-inf - 0) = 0 instead of NaN
        finite_lse = lse.masked_fill(lse == -torch.inf, 0)
        softmax = (scores - finite_lse.unsqueeze(-1)).exp_()
        outs.append(softmax.to(v.dtype) @ v)
        log_sums.append(lse)
    return torch.cat(outs, -2), torch.cat(log_sums, -1)


def plain_attention_backward(  # noqa: PLR0913  # inputs of the gradient of attention
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Mask,
    scale: float,
) -> Gradients:
    """Compute the gradients of `plain_attention`: `exp(scores - lse)` is the softmax of a row.

    Args:
        grad: the gradient of the output.
        q: the queries.
        k: keys; they may be a part of the keys that the queries read.
        v: the values of these keys.
        out: the output of the queries over all keys.
        lse: the log-sums of the queries over all keys. They are finite: 0 instead of -inf for a
            query that reads no key, whose softmax is then exp(-inf - 0) = 0.
        causal: as in the forward.
        mask: as in the forward.
        scale: as in the forward.
    """
    dq = torch.empty_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    # The gradient of the scores is
    #     dscores = softmax * (dsoftmax - delta), with delta = sum over all keys of
    #     softmax * dsoftmax.
    # `k` may be a part of the keys, so this sum cannot be computed here. But dsoftmax = grad @ v^T
    # and out = softmax @ v, therefore delta is also the sum of grad * out over the width.
    delta = (grad * out).sum(-1, keepdim=True)
    for rows, scores in _scores(q, k, causal, mask, scale=scale):
        row_grad = grad[..., rows, :]
        row_lse = lse[..., rows, None]
        softmax = scores.sub_(row_lse).exp_().to(q.dtype)
        dv += softmax.transpose(-1, -2) @ row_grad
        dsoftmax = row_grad @ v.transpose(-1, -2)
        row_delta = delta[..., rows, :]
        dscores = softmax * (dsoftmax - row_delta)
        dq[..., rows, :] = dscores @ k * scale
        row_q = q[..., rows, :]
        dk += dscores.transpose(-1, -2) @ row_q * scale
    return Gradients(dq, dk, dv)


def _scores(
    q: Tensor, k: Tensor, causal: bool, mask: Mask, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of queries and their scores (n, group, queries of the slice, keys).

    Scores are in float32, or in float64 for float64 queries.
    """
    limit = _MOST_SCORES_ON_CPU if q.is_cpu else _MOST_SCORES_ON_DEVICE
    score_dtype = torch.promote_types(q.dtype, torch.float32)
    # Example: 6 batch rows, 4 heads and 8192 keys -> 21 queries at a time on a CPU.
    batch_rows, heads, queries, _ = q.shape
    scores_per_query = batch_rows * heads * k.shape[-2]
    step = max(1, limit // max(1, scores_per_query))
    transposed_k = k.transpose(-1, -2)
    for start in range(0, queries, step):
        rows = slice(start, start + step)
        product = q[..., rows, :] @ transposed_k
        scores = product.to(score_dtype) * scale
        if mask is not None:
            scores.add_(mask[..., rows, :])
        if causal:
            # Query i reads the keys up to i; the first query of the slice is `start`.
            ones = scores.new_ones(scores.shape[-2:], dtype=torch.bool)
            is_later = ones.triu_(1 + start)
            scores.masked_fill_(is_later, -torch.inf)
        yield rows, scores


_PLAIN = AttentionKernel(plain_attention, plain_attention_backward)
# By type of device, the preferred kernel first; `_PLAIN` is the last choice on every device.
_KERNELS = {
    "cpu": [
        AttentionKernel(
            _torch.flash_attention, _torch.flash_attention_backward, needs_equal_widths=True
        )
    ],
    "cuda": [
        AttentionKernel(
            _torch.cuda_flash_attention,
            _torch.cuda_flash_attention_backward,
            width_multiple=8,
            needs_equal_widths=True,
            adds_mask=False,
            shares_key_heads=True,
            name_in_torch="flash",
        ),
        AttentionKernel(
            _torch.efficient_attention,
            _torch.efficient_attention_backward,
            width_multiple=8,
            name_in_torch="efficient",
        ),
    ],
}


def kernel_of(q: Tensor, v: Tensor, *, masked: bool) -> AttentionKernel:
    """Return the kernel for queries and values.

    The choice depends on the device, the dtype, the widths, `masked`, and whether the queries
    require a gradient. These are equal on all ranks, so all ranks choose the same kernel.
    """
    kernels: list[AttentionKernel] = [*_KERNELS.get(q.device.type, []), _PLAIN]
    return next(kernel for kernel in kernels if kernel.takes(q, v, masked))


class _KernelCall(NamedTuple):
    """A kernel and its arguments for one tile.

    Attributes:
        kernel: the kernel.
        causal: whether it masks later keys itself.
        mask: the mask that it adds to the scores.
    """

    kernel: AttentionKernel
    causal: bool
    mask: Mask


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """Attention inside a tile.

    Attributes:
        scale: factor of the scores.
        reach: (left, right), the numbers of keys before and after its own position that a query
            reads; used in tiles at a window's edge.
        attn_mask: (n or 1, group or 1, queries of the rank, keys of the whole sequence), added to
            the scores; None for none.
        unmasked: the kernel of tiles without a mask.
        masked: the kernel of tiles with a mask that is added to the scores.
    """

    scale: float
    reach: tuple[int, int]
    attn_mask: Mask
    unmasked: AttentionKernel
    masked: AttentionKernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Outputs:
        """Return output and log-sum-exp of a tile's queries.

        Their shapes are (n, group, queries, width) and (n, group, queries).
        """
        kernel, causal, mask = self._call_of(q, k, tile)
        if not kernel.shares_key_heads:
            k = _expand_heads(k, q)
            v = _expand_heads(v, q)
        out, lse = kernel.forward(q, k, v, causal, mask=mask, scale=self.scale)
        # A row of the user's mask may allow no key of this tile. Kernels do not agree on the
        # results of such a row, so they are set here. Only `attn_mask` can leave a query of a tile
        # without a key: causal tiles and tiles at a window's edge have a key for each query.
        if self.attn_mask is not None and mask is not None:
            reads_no_key = mask.amax(-1) == -torch.inf
            out = out.masked_fill(reads_no_key.unsqueeze(-1), 0)
            lse = lse.masked_fill(reads_no_key, -torch.inf)
        return out, lse

    def backward(  # noqa: PLR0913  # inputs of the gradient of attention
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> Gradients:
        """Return the gradients of a tile's queries, keys and values.

        `out` and `lse` are the results of the tile's queries over all keys, of other tiles too. The
        log-sums are finite: 0 for a query that reads no key.
        """
        kernel, causal, mask = self._call_of(q, k, tile)
        keys = k if kernel.shares_key_heads else _expand_heads(k, q)
        values = v if kernel.shares_key_heads else _expand_heads(v, q)
        operands = (grad, q, keys, values, out, lse)
        dq, dk, dv = kernel.backward(*operands, causal=causal, mask=mask, scale=self.scale)
        # The gradient of a head of keys is the sum over the query heads that share it.
        if dk.shape != k.shape:
            dk = dk.sum(1, keepdim=True)
        if dv.shape != v.shape:
            dv = dv.sum(1, keepdim=True)
        return Gradients(dq, dk, dv)

    def _call_of(self, q: Tensor, k: Tensor, tile: Tile) -> _KernelCall:
        """Choose the kernel of a tile, and its mask.

        Without `attn_mask`, only tiles at a window's edge need a mask, because kernels mask later
        keys by themselves. With `attn_mask`, the tile's part of it is the mask, and the limits of a
        causal tile or of a window are added to this part.
        """
        kind = tile.kind
        if self.attn_mask is None and kind is not TileKind.BAND:
            return _KernelCall(self.unmasked, causal=kind is TileKind.CAUSAL, mask=None)
        mask = None
        if self.attn_mask is not None:
            mask = _mask_of_tile(self.attn_mask, tile, tile_rows=q.shape[0], keys=k.shape[-2])
        if kind is not TileKind.FULL:
            band = self._band(q, k, tile)
            mask = band[None, None] if mask is None else mask + band
        return _KernelCall(self.masked, causal=False, mask=mask)

    def _band(self, q: Tensor, k: Tensor, tile: Tile) -> Tensor:
        """Return zeros for the keys that each query of a tile reads, -inf for others.

        The shape is (queries, keys).
        """
        causal_reach = (UNBOUNDED, 0)
        left, right = self.reach if tile.kind is TileKind.BAND else causal_reach
        query_ids = torch.arange(q.shape[-2], device=q.device)
        key_ids = torch.arange(k.shape[-2], device=q.device)
        # Global position of the key minus global position of the query. `tile.offset` is the
        # position of the first query minus the position of the first key. Example: queries from
        # position 6 and keys from position 4, offset 2 -> key 4 is -2 ahead of query 6.
        ahead = key_ids - query_ids.unsqueeze(-1) - tile.offset
        is_outside = (ahead > right) | (ahead < -left)
        band = torch.zeros(is_outside.shape, dtype=q.dtype, device=q.device)
        return band.masked_fill_(is_outside, -torch.inf)


def _expand_heads(tensor: Tensor, q: Tensor) -> Tensor:
    """Repeat heads of keys or values (n, 1, keys, width) for the query heads of their group."""
    return tensor.expand(-1, q.shape[1], -1, -1)


def _mask_of_tile(mask: Tensor, tile: Tile, *, tile_rows: int, keys: int) -> Tensor:
    """Return the part of a mask for a tile.

    Example: 3 batch rows with 2 heads of keys, so n is 6. A tile of batch row 1 has the rows 2:4 of
    the first dim, and `tile_rows` is 2. A tile of all batch rows has all 6 rows.

    Args:
        mask: (n or 1, group or 1, queries of the rank, keys of the whole sequence).
        tile: the tile.
        tile_rows: size of the first dim of the tile's queries: n, or the number of heads of keys if
            the tile is of one batch row.
        keys: number of the tile's keys.
    """
    end_key = tile.first_key + keys
    mask = mask[..., tile.queries, tile.first_key : end_key]
    if tile.row is None or mask.shape[0] == 1:
        return mask
    first_row = tile.row * tile_rows
    return mask[first_row : first_row + tile_rows]
