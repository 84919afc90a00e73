"""A GPT of a few thousand parameters, and its plan."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shoal_dtensor import Replicate, Shard
from shoal_tp_styles import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel


class SelfAttention(nn.Module):
    """Causal attention over the heads that the projections return."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.resid_dropout(self.wo(heads.transpose(1, 2).flatten(-2)))
        return out


class GptBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, dropout)
        up, down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        layers = {"w1": up, "gelu": nn.GELU(), "w2": down, "resid_dropout": nn.Dropout(dropout)}
        self.feed_forward = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.attention(self.attention_norm(x))
        out: Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return out


class Gpt(nn.Module):
    """Tokens `(batch, sequence)` -> logits; `gpt_plan` parallelizes it."""

    def __init__(
        self,
        n_layers: int = 2,
        dim: int = 16,
        heads: int = 4,
        vocab_size: int = 8,
        length: int = 16,
        dropout: float = 0.1,
        tied: bool = True,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tok_embeddings, self.pos_embeddings = (
            nn.Embedding(vocab_size, dim),
            nn.Embedding(length, dim),
        )
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(GptBlock(dim, heads, dropout) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.tok_embeddings.weight = self.output.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(positions))
        for layer in self.layers:
            hidden = (
                checkpoint(layer, hidden, use_reentrant=False)
                if self.checkpointed
                else layer(hidden)
            )
        logits: Tensor = self.output(self.norm(hidden))
        return logits


def gpt_plan(sequence: bool = False) -> dict[str, ParallelStyle]:
    """The plan of `Gpt`; with `sequence`, norms, dropouts, residuals get parts of the sequence."""
    between = Shard(1) if sequence else Replicate()
    columns, rows = ColwiseParallel(input_layouts=between), RowwiseParallel(output_layouts=between)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    plan: dict[str, ParallelStyle] = {
        "*_embeddings": embedding,
        "layers.*.attention.w[qkv]": columns,
        "layers.*.attention.wo": rows,
        "layers.*.feed_forward.w1": columns,
        "layers.*.feed_forward.w2": rows,
        "output": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    norms_and_dropouts = ("dropout", "norm", "layers.*.*_norm", "layers.*.*.resid_dropout")
    return plan | {
        path: SequenceParallel(use_local_output=True) for path in norms_and_dropouts if sequence
    }
