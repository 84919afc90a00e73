"""One case for each lowering: a module, its style, and the input outside of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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


def mixture_of_six() -> nn.Module:
    return Mixture(PackedExperts(6), 6)


def first_output_of(kind: Callable[..., nn.Module]) -> nn.Module:
    """The first output of a recurrent module of two layers."""
    return FirstOutput(kind(8, 8, num_layers=2))


ROWS = Shard(-1)
CASES: dict[str, Case] = {
    "columns": Case(linear, ColwiseParallel()),
    "columns gathered": Case(linear, ColwiseParallel(output_layouts=Replicate())),
    "columns to another dim": Case(linear, ColwiseParallel(output_layouts=Shard(0))),
    "columns of a shard": Case(linear, ColwiseParallel(input_layouts=Shard(0)), layout=Shard(0)),
    "overlapped columns": Case(
        linear, ColwiseParallel(input_layouts=Shard(0)).overlapped(2), layout=Shard(0), input=(8, 8)
    ),
    "columns as DTensor": Case(
        linear, ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    ),
    "rows": Case(linear, RowwiseParallel(), layout=ROWS),
    "rows of a replicated input": Case(linear, RowwiseParallel(input_layouts=Replicate())),
    "rows scattered": Case(linear, RowwiseParallel(output_layouts=Shard(0)), layout=ROWS),
    "rows scattered as DTensor": Case(
        linear, RowwiseParallel(output_layouts=Shard(0), use_local_output=False), layout=ROWS
    ),
    "rows left partial": Case(linear, RowwiseParallel(output_layouts=Partial()), layout=ROWS),
    "overlapped rows": Case(linear, RowwiseParallel().overlapped(2), layout=ROWS),
    "overlapped rows, scattered": Case(
        linear, RowwiseParallel(output_layouts=Shard(1)).overlapped(2), layout=ROWS, input=(4, 4, 8)
    ),
    "transposed columns": Case(Conv1D, ColwiseParallel()),
    "transposed rows": Case(Conv1D, RowwiseParallel(output_layouts=Shard(0)), layout=ROWS),
    "fused": Case(partial(nn.Linear, 8, 24), PackedColwiseParallel(blocks=3)),
    "fused, replicated heads": Case(
        partial(nn.Linear, 8, 16),
        PackedColwiseParallel(blocks={"q": Heads(4, 2), "k": Heads(2, 2), "v": Heads(2, 2)}),
    ),
    "heads of several ranks": Case(partial(nn.Linear, 8, 4), ColwiseParallel().heads(2, 2)),
    "adapter columns": Case(linear, LoRA(base=ColwiseParallel(), rank=2)),
    "adapter rows": Case(
        linear, LoRA(base=RowwiseParallel(output_layouts=Shard(0)), rank=2), layout=ROWS
    ),
    "adapter rows, trained base": Case(
        linear,
        LoRA(base=RowwiseParallel(output_layouts=Shard(0)), rank=2, train_base=True),
        layout=ROWS,
    ),
    "convolution columns": Case(
        partial(nn.Conv1d, 8, 8, 1), ColwiseParallel(), layout=Replicate(), input=(4, 8, 3)
    ),
    "convolution rows": Case(
        partial(nn.Conv1d, 8, 8, 1), RowwiseParallel(), layout=Shard(1), input=(4, 8, 3)
    ),
    "convolution rows, scattered": Case(
        partial(nn.Conv1d, 8, 8, 1),
        RowwiseParallel(output_layouts=Shard(0)),
        layout=Shard(1),
        input=(4, 8, 3),
    ),
    "transposed convolution columns": Case(
        partial(nn.ConvTranspose1d, 8, 8, 2, stride=2),
        ColwiseParallel(),
        layout=Replicate(),
        input=(4, 8, 3),
    ),
    "transposed convolution rows": Case(
        partial(nn.ConvTranspose1d, 8, 8, 2, stride=2),
        RowwiseParallel(),
        layout=Shard(1),
        input=(4, 8, 3),
    ),
    "groups of a convolution, gathered": Case(
        partial(nn.Conv1d, 8, 8, 1, groups=4),
        ColwiseParallel(output_layouts=Replicate()),
        layout=Replicate(),
        input=(4, 8, 3),
    ),
    "groups of a convolution, by rows": Case(
        partial(nn.Conv1d, 8, 8, 1, groups=8), RowwiseParallel(), layout=Shard(1), input=(4, 8, 3)
    ),
    "depthwise": Case(
        partial(nn.Conv1d, 8, 8, 1, groups=8), ChannelParallel(), layout=Shard(1), input=(4, 8, 3)
    ),
    "batch norm": Case(
        partial(nn.BatchNorm1d, 8), ChannelParallel(), layout=Shard(1), input=(4, 8, 3)
    ),
    "vocabulary": Case(
        partial(nn.Embedding, 8, 8), RowwiseParallel(input_layouts=Replicate()), input=TOKENS
    ),
    "vocabulary, scattered": Case(
        partial(nn.Embedding, 8, 8),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        input=TOKENS,
    ),
    "embedding of gathered tokens": Case(
        partial(nn.Embedding, 8, 8),
        ColwiseParallel(input_layouts=Shard(0)),
        layout=Shard(0),
        input=TOKENS,
    ),
    "embedding features, gathered": Case(
        partial(nn.Embedding, 8, 8), ColwiseParallel(output_layouts=Replicate()), input=TOKENS
    ),
    "bag of features": Case(
        partial(nn.EmbeddingBag, 8, 8), ColwiseParallel(), input=TOKENS.view(2, 4)
    ),
    "bag of a vocabulary": Case(
        partial(nn.EmbeddingBag, 8, 8, mode="sum"),
        RowwiseParallel(input_layouts=Replicate()),
        input=TOKENS.view(2, 4),
    ),
    **{
        f"own bags, {type(style).__name__}": Case(
            Bags, style, layout=Shard(0), input=TOKENS, path="inner"
        )
        for style in (
            ColwiseParallel(input_layouts=Shard(0)),
            RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0)),
        )
    },
    "experts of sharded tokens": Case(
        mixture_of_six, ExpertParallel(), layout=Shard(0), path="experts"
    ),
    "experts of all tokens": Case(
        mixture_of_six,
        ExpertParallel(input_layouts=Replicate()),
        path="experts",
    ),
    "features of experts": Case(mixture_of_six, ExpertTensorParallel(), path="experts"),
    "identity expert": Case(nn.Identity, IdentityExpert()),
    "latent": Case(linear, LatentProjection(rotary=3)),
    "own parameters": Case(partial(Scale, 8), OwnParameters(dims={"scale": 0}), layout=ROWS),
    "norm": Case(
        partial(nn.LayerNorm, 8),
        SequenceParallel(use_local_output=True),
        layout=Shard(1),
        input=(2, 4, 8),
    ),
    "groups": Case(
        partial(nn.GroupNorm, 4, 8), ChannelParallel(), layout=Shard(1), input=(2, 8, 4)
    ),
    "recurrent": Case(
        partial(nn.RNN, 8, 8),
        SequenceParallel(use_local_output=True),
        layout=Shard(1),
        input=(3, 4, 8),
    ),
    **{
        f"hidden units of {kind.__name__}": Case(
            partial(first_output_of, kind),
            ColwiseParallel(output_layouts=Replicate()),
            layout=Replicate(),
            input=(3, 4, 8),
            path="inner",
        )
        for kind in (nn.RNN, nn.LSTM, nn.GRU)
    },
    "dropout": Case(
        partial(nn.Dropout, 0.5),
        SequenceParallel(use_local_output=True),
        layout=Shard(1),
        input=(2, 4, 8),
    ),
    **{
        f"attention, weights {weights}, same {same}": Case(
            partial(SelfAttention, weights=weights, same=same),
            HeadParallel(),
            layout=Replicate(),
            input=(2, 4, 8),
            path="inner",
        )
        for weights in (True, False)
        for same in (True, False)
    },
    "attention, scattered": Case(
        partial(SelfAttention, weights=False, same=True),
        HeadParallel(output_layouts=Shard(1)),
        layout=Replicate(),
        input=(2, 4, 8),
        path="inner",
    ),
    **{
        f"context, {method}": Case(
            Mixing, ContextParallel(method=method), layout=Shard(1), input=(2, 8, 8)
        )
        for method in ("allgather", "ring", "ulysses")
    },
    "prepared input, gathered": Case(
        nn.Identity,
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        layout=Shard(0),
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
        layout=Shard(0),
    ),
}
