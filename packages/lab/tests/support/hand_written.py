"""Parallel layers as people write them by hand.

They have process groups, autograd functions, and shards of plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Axis(NamedTuple):
    """A process group along a mesh axis.

    Attributes:
        group: of this rank.
        position: of this rank in the group.
        size: of the group.
    """

    group: Any
    position: int
    size: int


def make_axes(mesh: Mapping[str, int]) -> dict[str, Axis]:
    """Make a process group along every axis of a mesh in row-major order."""
    sizes = list(mesh.values())
    ranks = torch.arange(dist.get_world_size()).view(sizes)
    place = (ranks == dist.get_rank()).nonzero()[0].tolist()
    axes = dict[str, Axis]()
    for dim, name in enumerate(mesh):
        for members in ranks.movedim(dim, -1).reshape(-1, sizes[dim]).tolist():
            group = dist.new_group(members)
            if dist.get_rank() in members:
                axes[name] = Axis(group, place[dim], sizes[dim])
    return axes


def rows(tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return this rank's chunk of a tensor."""
    chunks = tensor.tensor_split(axis.size, dim)
    return chunks[axis.position]


def batch(step: int, *shape: int) -> Tensor:
    """Return the global batch of a step: the same on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(*shape, generator=generator)


def tokens(step: int, high: int, *shape: int) -> Tensor:
    """Return the token ids of a step: the same on every rank."""
    generator = torch.Generator().manual_seed(200 + step)
    return torch.randint(high, shape, generator=generator)


class CopyToAxis(torch.autograd.Function):
    """The input of column-parallel layers: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.axis.group)
        return total, None


class ReduceFromAxis(torch.autograd.Function):
    """The output of row-parallel layers: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class GatherRows(torch.autograd.Function):
    """Rows of all ranks.

    Backward sums over ranks and keeps this rank's rows, or only keeps them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sums: bool) -> Tensor:
        ctx.choices = (axis, dim, sums)
        parts = [torch.empty_like(x) for _ in range(axis.size)]
        dist.all_gather(parts, x.contiguous(), group=axis.group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        axis, dim, sums = ctx.choices
        total = gradient.contiguous().clone()
        if sums:
            dist.all_reduce(total, group=axis.group)
        return rows(total, axis, dim).clone(), None, None, None


class ScatterSum(torch.autograd.Function):
    """The sum over ranks, of which each keeps its rows; backward gathers the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.choices = (axis, dim)
        total = x.clone()
        dist.all_reduce(total, group=axis.group)
        return rows(total, axis, dim).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        axis, dim = ctx.choices
        parts = [torch.empty_like(gradient) for _ in range(axis.size)]
        dist.all_gather(parts, gradient.contiguous(), group=axis.group)
        return torch.cat(parts, dim), None, None


def column(whole: nn.Linear, axis: Axis) -> Any:
    """Return this rank's output features of a linear layer."""
    count = rows(whole.weight, axis).shape[0]
    has_bias = whole.bias is not None
    # Random numbers are drawn for the whole layer only.
    layer = nn.utils.skip_init(nn.Linear, whole.in_features, count, bias=has_bias)
    with torch.no_grad():
        layer.weight.copy_(rows(whole.weight, axis))
        if whole.bias is not None:
            layer.bias.copy_(rows(whole.bias, axis))
    return layer


def row(whole: nn.Linear, axis: Axis) -> Any:
    """Return this rank's input features of a linear layer without bias."""
    count = rows(whole.weight, axis, 1).shape[1]
    layer = nn.utils.skip_init(nn.Linear, count, whole.out_features, bias=False)
    with torch.no_grad():
        layer.weight.copy_(rows(whole.weight, axis, 1))
    return layer


class Block(nn.Module):
    """A norm and a tensor-parallel MLP around a residual.

    Args:
        width: of the input.
        tp: the axis of the shards.
        wrong: the name of a mistake; "" for none.
    """

    def __init__(self, width: int, tp: Axis, wrong: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = column(nn.Linear(width, 4 * width), tp)
        self.down = row(nn.Linear(4 * width, width, bias=False), tp)
        self.bias = nn.Parameter(torch.linspace(-1, 1, width))
        self._tp = tp
        self._wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to rows."""
        hidden = self.norm(x)
        if self._wrong != "no copy":
            hidden = CopyToAxis.apply(hidden, self._tp)
        hidden = self.down(torch.tanh(self.up(hidden)))
        if self._wrong == "bias before":
            hidden = hidden + self.bias
        if self._wrong != "no reduce":
            hidden = ReduceFromAxis.apply(hidden, self._tp)
        if self._wrong != "bias before":
            hidden = hidden + self.bias
        return x + hidden


def average(parameters: Iterable[nn.Parameter], axis: Axis, divisor: float | None = None) -> None:
    """Sum the gradients over an axis, and divide them by its size or another number."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=axis.group)
            parameter.grad /= axis.size if divisor is None else divisor


def total_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of the gradients on this rank."""
    squares = [p.grad.square().sum() for p in parameters if p.grad is not None]
    return torch.stack(squares).sum().sqrt()


def clip(parameters: Iterable[nn.Parameter], limit: float, norm: Tensor) -> None:
    """Scale gradients down to a norm."""
    factor = min(1.0, limit / float(norm))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= factor
