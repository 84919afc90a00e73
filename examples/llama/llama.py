"""A Llama-style language model in plain PyTorch.

It has RMSNorm, rotary embeddings, grouped-query attention and SwiGLU.

The file does not mention ranks. Two habits make the model easy to parallelize: every projection is
its own `nn.Linear`, and the number of heads follows from the activations (`-1`) instead of the
config, so a rank with half of the heads runs the same line.

Shapes: B batch, S sequence, D model width, H query heads, K key and value heads, E width of one
head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of the model, checked at construction, so that bad combinations never reach a rank."""

    dim: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 704
    vocab: int = 256  # bytes
    max_seq: int = 256
    dropout: float = 0.1
    tied: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"width {self.dim} does not split into {self.heads} heads of an even width"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        """Return the width of one head."""
        return self.dim // self.heads


class Attention(nn.Module):
    """Causal grouped-query attention with rotary position embeddings."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        q_BHSE = rotate(self.split(self.wq(x_BSD)), cos_SE, sin_SE)
        k_BKSE = rotate(self.split(self.wk(x_BSD)), cos_SE, sin_SE)
        v_BKSE = self.split(self.wv(x_BSD))
        out_BHSE = F.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=True
        )
        return self.wo(out_BHSE.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """(B, S, heads * E) -> (B, heads, S, E), for as many heads as are here."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: a gated projection up, and one down."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, added to the residual stream.

    Each is normalised before, with dropout after.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)
        self.feed_forward_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x)))


class Llama(nn.Module):
    """Tokens (B, S) -> logits (B, S, V)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("wo.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * config.layers) ** 0.5 if residual else 0.02)
        if config.tied:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_table(config.max_seq, config.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens_BS.shape[1]], self.sin[: tokens_BS.shape[1]]
        x_BSD = self.embedding_dropout(self.embedding(tokens_BS))
        for block in self.blocks:
            x_BSD = block(x_BSD, cos, sin)
        return self.head(self.norm(x_BSD))


def rotary_table(positions: int, width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (S, E) of the rotation of each position and pair of features."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.outer(torch.arange(positions), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of features (first half with second half) by a position's angle.

    The tensor is (B, heads, S, E).
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
