"""One case for each lowering: a module, its style, and the input outside of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_models import Mixture, PackedExperts
from shoal_dtensor import Partial, Replicate, Shard
from shoal_tp_styles import (
    ChannelParallel,
    ColwiseParallel,
    ContextParallel,
    ExpertParallel,
    ExpertTensorParallel,
    HeadParallel,
    Heads,
    IdentityExpert,
    LatentProjection,
    LoRA,
    OwnParameters,
    PackedColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from toy_modules import Conv1D, FirstOutput, Scale, SelfAttention

TOKENS = torch.arange(8) % 7


class Bags(nn.Module):
    """Weighted sums of two tokens each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.EmbeddingBag(8, 8, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, torch.arange(0, x.shape[0], 2), x / 2)
        return out


class Mixing(nn.Module):
    """Attention of a tensor's two heads to themselves."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:-1], 2, -1).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


@dataclass(frozen=True)
class Case:
    """A module and its style; the input's layout outside, and its global shape (or the tokens)."""

    make: Callable[[], nn.Module]
    style: ParallelStyle
    layout: Any = None  # Replicate
    input: Any = (4, 8)
    path: str = ""


def linear() -> nn.Module:
    return nn.Linear(8, 8)


ROWS = Shard(-1)
CASES: dict[str, Case] = {
    "columns": Case(linear, ColwiseParallel()),
    "columns gathered": Case(linear, ColwiseParallel(output_layouts=Replicate())),
    "columns to another dim": Case(linear, ColwiseParallel(output_layouts=Shard(0))),
    "columns of a shard": Case(linear, ColwiseParallel(input_layouts=Shard(0)), Shard(0)),
    "overlapped columns": Case(
        linear, ColwiseParallel(input_layouts=Shard(0)).overlapped(2), Shard(0), (8, 8)
    ),
    "columns as DTensor": Case(
        linear, ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    ),
    "rows": Case(linear, RowwiseParallel(), ROWS),
    "rows of a replicated input": Case(linear, RowwiseParallel(input_layouts=Replicate())),
    "rows scattered": Case(linear, RowwiseParallel(output_layouts=Shard(0)), ROWS),
    "rows scattered as DTensor": Case(
        linear, RowwiseParallel(output_layouts=Shard(0), use_local_output=False), ROWS
    ),
    "rows left partial": Case(linear, RowwiseParallel(output_layouts=Partial()), ROWS),
    "overlapped rows": Case(linear, RowwiseParallel().overlapped(2), ROWS),
    "overlapped rows, scattered": Case(
        linear, RowwiseParallel(output_layouts=Shard(1)).overlapped(2), ROWS, (4, 4, 8)
    ),
    "transposed columns": Case(Conv1D, ColwiseParallel()),
    "transposed rows": Case(Conv1D, RowwiseParallel(output_layouts=Shard(0)), ROWS),
    "fused": Case(lambda: nn.Linear(8, 24), PackedColwiseParallel(blocks=3)),
    "fused, replicated heads": Case(
        lambda: nn.Linear(8, 16),
        PackedColwiseParallel(blocks={"q": Heads(4, 2), "k": Heads(2, 2), "v": Heads(2, 2)}),
    ),
    "heads of several ranks": Case(lambda: nn.Linear(8, 4), ColwiseParallel().heads(2, 2)),
    "adapter columns": Case(linear, LoRA(base=ColwiseParallel(), rank=2)),
    "adapter rows": Case(linear, LoRA(base=RowwiseParallel(output_layouts=Shard(0)), rank=2), ROWS),
    "adapter rows, trained base": Case(
        linear, LoRA(base=RowwiseParallel(output_layouts=Shard(0)), rank=2, train_base=True), ROWS
    ),
    "convolution columns": Case(
        lambda: nn.Conv1d(8, 8, 1), ColwiseParallel(), Replicate(), (4, 8, 3)
    ),
    "convolution rows": Case(lambda: nn.Conv1d(8, 8, 1), RowwiseParallel(), Shard(1), (4, 8, 3)),
    "convolution rows, scattered": Case(
        lambda: nn.Conv1d(8, 8, 1), RowwiseParallel(output_layouts=Shard(0)), Shard(1), (4, 8, 3)
    ),
    "transposed convolution columns": Case(
        lambda: nn.ConvTranspose1d(8, 8, 2, stride=2), ColwiseParallel(), Replicate(), (4, 8, 3)
    ),
    "transposed convolution rows": Case(
        lambda: nn.ConvTranspose1d(8, 8, 2, stride=2), RowwiseParallel(), Shard(1), (4, 8, 3)
    ),
    "groups of a convolution, gathered": Case(
        lambda: nn.Conv1d(8, 8, 1, groups=4),
        ColwiseParallel(output_layouts=Replicate()),
        Replicate(),
        (4, 8, 3),
    ),
    "groups of a convolution, by rows": Case(
        lambda: nn.Conv1d(8, 8, 1, groups=8), RowwiseParallel(), Shard(1), (4, 8, 3)
    ),
    "depthwise": Case(lambda: nn.Conv1d(8, 8, 1, groups=8), ChannelParallel(), Shard(1), (4, 8, 3)),
    "batch norm": Case(lambda: nn.BatchNorm1d(8), ChannelParallel(), Shard(1), (4, 8, 3)),
    "vocabulary": Case(
        lambda: nn.Embedding(8, 8), RowwiseParallel(input_layouts=Replicate()), input=TOKENS
    ),
    "vocabulary, scattered": Case(
        lambda: nn.Embedding(8, 8),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        input=TOKENS,
    ),
    "embedding of gathered tokens": Case(
        lambda: nn.Embedding(8, 8), ColwiseParallel(input_layouts=Shard(0)), Shard(0), TOKENS
    ),
    "embedding features, gathered": Case(
        lambda: nn.Embedding(8, 8), ColwiseParallel(output_layouts=Replicate()), input=TOKENS
    ),
    "bag of features": Case(
        lambda: nn.EmbeddingBag(8, 8), ColwiseParallel(), input=TOKENS.view(2, 4)
    ),
    "bag of a vocabulary": Case(
        lambda: nn.EmbeddingBag(8, 8, mode="sum"),
        RowwiseParallel(input_layouts=Replicate()),
        input=TOKENS.view(2, 4),
    ),
    **{
        f"own bags, {type(style).__name__}": Case(Bags, style, Shard(0), TOKENS, "inner")
        for style in (
            ColwiseParallel(input_layouts=Shard(0)),
            RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0)),
        )
    },
    "experts of sharded tokens": Case(
        lambda: Mixture(PackedExperts(6), 6), ExpertParallel(), Shard(0), path="experts"
    ),
    "experts of all tokens": Case(
        lambda: Mixture(PackedExperts(6), 6),
        ExpertParallel(input_layouts=Replicate()),
        path="experts",
    ),
    "features of experts": Case(
        lambda: Mixture(PackedExperts(6), 6), ExpertTensorParallel(), path="experts"
    ),
    "identity expert": Case(nn.Identity, IdentityExpert()),
    "latent": Case(linear, LatentProjection(rotary=3)),
    "own parameters": Case(lambda: Scale(8), OwnParameters(dims={"scale": 0}), ROWS),
    "norm": Case(
        lambda: nn.LayerNorm(8), SequenceParallel(use_local_output=True), Shard(1), (2, 4, 8)
    ),
    "groups": Case(lambda: nn.GroupNorm(4, 8), ChannelParallel(), Shard(1), (2, 8, 4)),
    "recurrent": Case(
        lambda: nn.RNN(8, 8), SequenceParallel(use_local_output=True), Shard(1), (3, 4, 8)
    ),
    **{
        f"hidden units of {kind.__name__}": Case(
            lambda kind=kind: FirstOutput(kind(8, 8, num_layers=2)),  # type: ignore[misc]  # a case
            ColwiseParallel(output_layouts=Replicate()),
            Replicate(),
            (3, 4, 8),
            "inner",
        )
        for kind in (nn.RNN, nn.LSTM, nn.GRU)
    },
    "dropout": Case(
        lambda: nn.Dropout(0.5), SequenceParallel(use_local_output=True), Shard(1), (2, 4, 8)
    ),
    **{
        f"attention, weights {weights}, same {same}": Case(
            lambda weights=weights, same=same: SelfAttention(  # type: ignore[misc]  # a case
                weights=weights, same=same
            ),
            HeadParallel(),
            Replicate(),
            (2, 4, 8),
            "inner",
        )
        for weights in (True, False)
        for same in (True, False)
    },
    "attention, scattered": Case(
        lambda: SelfAttention(weights=False, same=True),
        HeadParallel(output_layouts=Shard(1)),
        Replicate(),
        (2, 4, 8),
        "inner",
    ),
    **{
        f"context, {method}": Case(Mixing, ContextParallel(method=method), Shard(1), (2, 8, 8))
        for method in ("allgather", "ring", "ulysses")
    },
    "prepared input, gathered": Case(
        nn.Identity,
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        Shard(0),
    ),
    "prepared input, sharded": Case(
        nn.Identity, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
    ),
    "prepared output, reduced": Case(
        nn.Identity,
        PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
    ),
    "prepared output, scattered": Case(
        nn.Identity, PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Shard(0))
    ),
    "prepared output, resharded": Case(
        nn.Identity,
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Shard(1)),
        Shard(0),
    ),
}
