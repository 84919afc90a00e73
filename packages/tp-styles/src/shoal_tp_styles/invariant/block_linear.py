"""Linear layers in blocks: each product sees one sample and one block of features, whatever rank it runs on.

With 8 blocks, samples b and blocks j:

    columns   y[b, :, j] = x[b] W[j]^T            dx[b] = tree over j of dy[b, :, j] W[j]
    rows      y[b] = tree over j of x[b, :, j] W[:, j]^T        dx[b, :, j] = dy[b] W[:, j]
    both      dW[j] = tree over b of the sample's product

The upper part of the trees over j are the collectives of `ports`, those of the trees over b the reduction over data
axes. Every reader of an activation reduces its own gradient: the sum over readers comes after that over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from .._torch import apply, autocast_dtype
from ..errors import StyleError
from ..lowering.lowered import Lowered
from ..lowering.parameters import first_order_only
from ..lowering.ports import partial_output, replicated_input, sharded_input
from ..modules.column_linear import ColumnLinear
from ..modules.linear_gradients import cast
from ..modules.row_linear import RowLinear
from ..sharding.collective import Collective
from ..sharding.module_sharding import ModuleCall
from .block_sums import contiguous_block, own_blocks, tree_of
from .replicated import add_bias

__all__ = ["InvariantColumn", "InvariantRow", "InvariantWhole"]


class _Columns(Function):
    """x: (B, ..., K), W: (N, K), b: (N,) -> (B, ..., N), in `blocks` blocks of N."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.blocks = blocks
        rows = _blocks_of(weight, blocks, 0)
        biases = [None] * blocks if bias is None else _blocks_of(bias, blocks, 0)
        samples = [contiguous_block(sample) for sample in x]
        products = [torch.cat([linear(s, w, b) for w, b in zip(rows, biases, strict=True)], -1) for s in samples]
        return torch.stack(products) if products else linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        x, weight = ctx.saved_tensors
        blocks: int = ctx.blocks
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = _blocks_of(weight, blocks, 0)
        parts = [_blocks_of(sample, blocks, -1) for sample in grad]
        dx = dw = db = None
        if needs_x:
            sums = [tree_of(blocks, lambda j, p=part: p[j].matmul(rows[j])) for part in parts]  # type: ignore[misc]
            dx = torch.stack(sums) if sums else torch.zeros_like(x)
        if needs_weight:
            samples = [_matrix(sample) for sample in x]
            dw = torch.cat([_over_samples(parts, j, lambda p, i: p.t().mm(samples[i])) for j in range(blocks)])
        if needs_bias:
            db = torch.cat([_over_samples(parts, j, lambda p, i: p.sum(0)) for j in range(blocks)])
        return dx, dw, db, None


class _Rows(Function):
    """x: (B, ..., K), W: (N, K) -> (B, ..., N), the sum over `blocks` blocks of K."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, blocks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.blocks = blocks
        columns = _blocks_of(weight, blocks, 1)
        sums = []
        for sample in x:
            parts = _blocks_of(sample, blocks, -1)
            sums.append(tree_of(blocks, lambda j, p=parts: linear(p[j], columns[j])))  # type: ignore[misc]  # a default
        return torch.stack(sums) if sums else linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        x, weight = ctx.saved_tensors
        blocks: int = ctx.blocks
        needs_x, needs_weight, _ = ctx.needs_input_grad
        columns = _blocks_of(weight, blocks, 1)
        samples = [contiguous_block(sample) for sample in grad]
        dx = dw = None
        if needs_x:
            rows = [torch.cat([sample.matmul(column) for column in columns], -1) for sample in samples]
            dx = torch.stack(rows) if rows else torch.zeros_like(x)
        if needs_weight:
            parts = [_blocks_of(sample, blocks, -1) for sample in x]
            turned = [_matrix(sample).t() for sample in samples]
            dw = torch.cat([_over_samples(parts, j, lambda p, i: turned[i].mm(p)) for j in range(blocks)], 1)
        return dx, dw, None


def _blocks_of(tensor: Tensor, blocks: int, dim: int) -> list[Tensor]:
    return [contiguous_block(block) for block in tensor.chunk(blocks, dim)]


def _matrix(tensor: Tensor) -> Tensor:
    """(..., k) -> (rows, k)."""
    return contiguous_block(tensor.reshape(-1, tensor.shape[-1]))


def _over_samples(parts: list[list[Tensor]], block: int, product: Any) -> Tensor:
    """The tree over samples of a product of one block of each."""
    if not parts:
        raise StyleError("invariant_arithmetic: a rank without any sample has no sum over samples")
    return tree_of(len(parts), lambda i: product(_matrix(parts[i][block]), i))


class InvariantColumn(ColumnLinear):
    """A column-wise Linear in blocks."""

    __slots__ = ("blocks",)

    def resolve(self) -> None:
        super().resolve()
        self.blocks = own_blocks(self, "weight", 0)

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        for collective in super().collectives(call):
            yield replace(collective, once_for=None) if collective.backward else collective

    def __call__(self, input: Tensor) -> Tensor:
        if input.ndim == 1:
            return self(input.unsqueeze(0)).squeeze(0)
        dtype = autocast_dtype(input)
        local: Any = self.local("weight", "bias")
        weight, bias = cast(local["weight"], dtype), cast(local["bias"], dtype)
        # Cast first: the gradient is reduced in the dtype in which its blocks are added.
        x = replicated_input(self, input if dtype is None else input.to(dtype))
        return self.finish(apply(_Columns, x, weight, bias, self.blocks))


class InvariantRow(RowLinear):
    """A row-wise Linear in blocks."""

    __slots__ = ("blocks",)

    def resolve(self) -> None:
        super().resolve()
        self.blocks = own_blocks(self, "weight", 1)

    def __call__(self, input: Tensor) -> Tensor:
        if input.ndim == 1:
            return self(input.unsqueeze(0)).squeeze(0)
        dtype = autocast_dtype(input)
        weight = cast(self.local("weight")["weight"], dtype)
        x = sharded_input(self, input, input.ndim - 1, self.spec("weight").sizes(1))
        partial: Tensor = apply(_Rows, cast(x, dtype), weight, self.blocks)
        return add_bias(self, partial_output(self, partial, None))


class InvariantWhole(Lowered):
    """A Linear that no style shards, sample by sample."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from ()

    def __call__(self, input: Tensor) -> Tensor:
        if input.ndim == 1:
            return self(input.unsqueeze(0)).squeeze(0)
        dtype = autocast_dtype(input)
        local: Any = self.local("weight", "bias")
        x, weight, bias = (cast(tensor, dtype) for tensor in (input, local["weight"], local["bias"]))
        out: Tensor = apply(_Columns, x, weight, bias, 1)
        return out
