"""Covers: block_attention.py, _torch.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal_context_parallel import block_attention
from shoal_context_parallel.attention_mask import Tile, TileKind
from shoal_context_parallel.block_attention import BlockKernel, merge


@pytest.mark.parametrize("width", [8, 5])  # of values: with another width than keys no fused kernel runs
@pytest.mark.parametrize("kind", list(TileKind))
@pytest.mark.parametrize("masked", [False, True])
def test_a_tile_is_softmax(kind: TileKind, masked: bool, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "_SCORES", 2 * 3 * 6 * 2)  # two queries at a time
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, g, n, w, dtype=torch.double, generator=generator).requires_grad_()
        for g, n, w in ((3, 5, 8), (1, 6, 8), (1, 6, width))
    )
    tile = Tile(None, slice(0, 5), slice(0, 6), kind, 1 if kind is TileKind.BAND else 0, 0)
    behind = torch.arange(5).unsqueeze(-1) + tile.offset - torch.arange(6)
    reads = {TileKind.FULL: behind > -9, TileKind.CAUSAL: behind >= 0, TileKind.BAND: (behind <= 2) & (behind >= -1)}
    added: Tensor | None = None
    if masked:
        added = torch.randn(1, 1, 5, 6, dtype=torch.double, generator=generator)
        added[..., 2, :] = -math.inf  # a query that reads nothing
    kernel = BlockKernel(0.3, (2, 1), added)
    scores = (q @ k.transpose(-1, -2) * 0.3 + (0 if added is None else added)).masked_fill(~reads[kind], -math.inf)
    reading = scores.amax(-1, keepdim=True) > -math.inf
    expected = (torch.where(reading, scores, 0).softmax(-1) * reading) @ v
    with torch.no_grad():
        out, sums = kernel.forward(q, k, v, tile)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(sums, scores.logsumexp(-1))
    seed = torch.randn(out.shape, dtype=torch.double, generator=generator)
    with torch.no_grad():
        found = kernel.backward(seed, q, k, v, out, sums.masked_fill(sums == -math.inf, 0), tile)
    for got, want in zip(found, torch.autograd.grad(expected, (q, k, v), seed), strict=True):
        torch.testing.assert_close(got, want)


def test_merging_blocks_is_one_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(2, 3, 8, generator=generator), torch.randn(2, 8, 4, generator=generator)
    scores[0, 1] = -torch.inf  # reads nothing
    scores[0, 2, :4] = -torch.inf  # reads nothing of the first block
    out, lse = torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf)
    for keys in (slice(0, 4), slice(4, 8)):
        block = scores[..., keys]
        merge(out, lse, block.softmax(-1).nan_to_num() @ values[:, keys], block.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1).nan_to_num() @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
