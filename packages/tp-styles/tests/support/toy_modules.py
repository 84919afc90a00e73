"""Toy modules without a plan, each of which shows one thing that a style meets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Conv1D(nn.Module):
    """A Linear whose weight is (in, out), as GPT-2's.

    Args:
        rows: input features.
        columns: output features.
        bias: whether it has one.
    """

    def __init__(self, rows: int = 8, columns: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.nf = columns
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.bias = nn.Parameter(torch.randn(columns)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.t(), self.bias)


class FeedForward(nn.Module):
    """Two products with a ReLU between them; input and output have the same shape.

    Args:
        width: features of the input.
        hidden: features between the products.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


class FusedGate(nn.Module):
    """One product whose two halves are multiplied; input and output have the same shape.

    Args:
        width: features of the input.
        hidden: features of each half.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fused = nn.Linear(width, 2 * hidden)
        self.rows = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fused(x).chunk(2, -1)
        out: Tensor = self.rows(gate * value)
        return out


class SelfAttention(nn.Module):
    """Attention of a tensor to itself, or to twice itself.

    Args:
        width: features of the input.
        heads: attention heads.
        weights: whether the attention weights are computed.
        same: whether query, key and value are one tensor.
    """

    def __init__(
        self, width: int = 8, heads: int = 4, *, weights: bool = False, same: bool = True
    ) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True)
        self.weights = weights
        self.same = same

    def forward(self, x: Tensor) -> Tensor:
        other = x if self.same else x * 2
        out: Tensor = self.inner(x, other, other, need_weights=self.weights)[0]
        return out


class Scale(nn.Module):
    """A parameter that the forward reads itself.

    Args:
        sizes: shape of the parameter; none: a number.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(sizes))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class FirstOutput(nn.Module):
    """The first output of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class BehindOperation(nn.Module):
    """A module behind an operation, so that its input is an activation."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x * 1 if x.is_floating_point() else x)
