"""Models of a program: stacks of small blocks between an embedding and a head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from integration_tests.random_training.compose import Program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WORDS, ROWS, LENGTH = 11, 8, 4


class Block(nn.Module):
    """A block with a residual, of one of `KINDS`."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        if kind == "attention":
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=i < 3) for i in range(4))
        if kind == "scaled":
            self.scale = nn.Parameter(torch.ones(()))
        if kind == "shared":
            self.again = self.up
        if kind == "inner":
            self.inner = nn.Sequential(
                nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)
            )
        self.unused = nn.Parameter(torch.ones(3)) if kind == "norm" else None

    def forward(self, x: Tensor, use: bool) -> Any:
        if self.kind == "optional" and not use:
            return x + self.norm(x)
        y = self.norm(x)
        if self.kind == "attention":
            q, k, v = (
                one(y).unflatten(-1, (2, -1)).transpose(1, 2) for one in (self.q, self.k, self.v)
            )
            y = self.o(
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
        if self.kind == "inner":
            y = self.inner(y)
        hidden = torch.tanh(self.up(y))
        if self.kind == "shared":
            hidden = hidden + self.again(x)
        y = self.down(hidden)
        return x + (y * self.scale if self.kind == "scaled" else y)


class Model(nn.Module):
    """Tokens -> logits."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.checkpoint = program.checkpoint
        self.embed = nn.Embedding(WORDS, program.width)
        self.blocks = nn.ModuleList(Block(kind, program.width) for kind in program.blocks)
        self.head = nn.Linear(program.width, WORDS, bias=False)
        if program.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, use: bool) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpoint and self.training:
                x = checkpoint(block, x, use, use_reentrant=self.checkpoint == "reentrant")
            else:
                x = block(x, use)
        out: Tensor = self.head(x)
        return out


def model_of(program: Program) -> Any:
    """The plain model, in float64."""
    torch.manual_seed(program.seed)
    return Model(program).double()


def batch_of(program: Program, number: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (ROWS, LENGTH)."""
    generator = torch.Generator().manual_seed(1000 * program.seed + number)
    tokens = torch.randint(WORDS, (2, ROWS, LENGTH), generator=generator)
    return tokens[0], tokens[1]
