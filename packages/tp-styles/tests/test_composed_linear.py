"""Projections that are fused, by blocks and by heads.

Covers: modules/composed_linear.py, styles/linear.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from one_device import as_one_device
from shoal_dtensor import Replicate, Shard
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    Heads,
    PackedColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention over whatever heads the projections give, separate or fused."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head: int, fused: bool) -> None:
        super().__init__()
        self.head, self.group = head, heads // kv_heads
        self.widths = [heads * head, kv_heads * head, kv_heads * head]
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, sum(self.widths)) if fused else None
        if not fused:
            self.q, self.k, self.v = (nn.Linear(dim, width) for width in self.widths)
        self.o = nn.Linear(heads * head, dim)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, sequence, dim)` in and out."""
        h = self.norm(x)
        if self.qkv is not None:
            packed = self.qkv(h)
            kv = (
                packed.shape[-1] // (self.group + 2)
                if packed.shape[-1] % (self.group + 2) == 0
                else self.head
            )
            q, k, v = packed.split([packed.shape[-1] - 2 * kv, kv, kv], -1)
        else:
            q, k, v = self.q(h), self.k(h), self.v(h)
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in (q, k, v))
        repeats = q.shape[1] // k.shape[1] if k.shape[1] else 1
        k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = x + self.o(out.transpose(1, 2).flatten(-2))
        return result


# (query heads, kv heads): enough of both, fewer kv heads than ranks, uneven.
GROUPS = [(8, 4), (8, 2), (8, 1), (12, 6)]


@on_ranks(4)
@pytest.mark.parametrize(("heads", "kv"), GROUPS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_grouped_query_attention(heads: int, kv: int, fused: bool, sequence: bool) -> None:
    single = GroupedQueryAttention(16, heads, kv, 4, fused).double()
    arriving = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {"o": RowwiseParallel(output_layouts=arriving)}
    q = Heads(heads, 4)
    # six groups on four ranks: complete groups, unevenly
    if kv == 6:
        q = Heads(6, 8)
        plan["o"] = plan["o"].heads(6, 8)
    if fused:
        blocks = {"q": q, "k": Heads(kv, 4), "v": Heads(kv, 4)}
        plan["qkv"] = PackedColwiseParallel(blocks=blocks, input_layouts=arriving)
    else:
        plan["q"] = ColwiseParallel(input_layouts=arriving).heads(q.count, q.size)
        plan["k"] = plan["v"] = ColwiseParallel(input_layouts=arriving).heads(kv, 4)
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
    x = torch.randn(2, 8, 16, dtype=torch.double)
    run = as_one_device(single, plan, all_ranks(), [x], arriving=arriving, leaving=arriving)
    if not sequence and kv >= 4:
        assert run.backward["all_reduce"] == 1  # one reduction for q, k and v
