"""Embedding tables whose gradient is a tree over samples; a sample's own rows are added in the order of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shoal_dtensor.errors import UnsupportedModuleError
from shoal_dtensor.internal import first_order_only
from shoal_tp_styles import Collective, Lowered, ModuleCall
from shoal_tp_styles.internal import ColumnEmbedding, RowEmbedding, partial_output, replicated_tokens

from .._torch import apply
from .block_sums import tree_of


class _Lookup(Function):
    """tokens: (B, ...), rows `first` and on of a table -> (B, ..., D); zeros for tokens of other rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, first: int, padding: int | None) -> Tensor:
        local_rows = tokens - first
        local_rows = torch.where((local_rows >= 0) & (local_rows < table.shape[0]), local_rows, table.shape[0])
        ctx.save_for_backward(local_rows)
        ctx.table = table.shape[0], -1 if padding is None or not 0 <= padding - first < len(table) else padding - first
        out = functional.embedding(local_rows.clamp(max=max(len(table) - 1, 0)), table)
        return out.masked_fill_((local_rows == len(table)).unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        (local_rows,) = ctx.saved_tensors
        rows, padding = ctx.table
        tokens, grads = (local_rows.unsqueeze(0), grad.unsqueeze(0)) if local_rows.ndim < 2 else (local_rows, grad)
        return None, embedding_gradient(grads, tokens, rows, padding), None, None


def embedding_gradient(grads: Tensor, tokens: Tensor, rows: int, padding: int) -> Tensor:
    """(B, ..., D), (B, ...) -> (rows, D): the tree over samples; token `rows` counts for none."""

    def of_sample(i: int) -> Tensor:
        dense: Tensor = torch.ops.aten.embedding_dense_backward(
            grads[i].contiguous(), tokens[i], rows + 1, padding, False
        )
        return dense[:rows]

    return tree_of(len(tokens), of_sample)


def _look_up(lowered: Lowered, tokens: Tensor, first: int) -> Tensor:
    module: Any = lowered.module
    if module.scale_grad_by_freq or module.max_norm is not None or module.sparse:
        raise UnsupportedModuleError(
            f"invariant_arithmetic: {module} counts or changes rows over all samples (scale_grad_by_freq, max_norm, "
            "sparse), so its gradient is no sum over samples"
        )
    out: Tensor = apply(_Lookup, tokens, lowered.local("weight")["weight"], first, module.padding_idx)
    return out


class InvariantRowEmbedding(RowEmbedding):
    """An embedding whose vocabulary is sharded."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        rows = _look_up(self, replicated_tokens(self, input), self.spec("weight").offset(0))
        return partial_output(self, rows, None)


class InvariantColumnEmbedding(ColumnEmbedding):
    """An embedding whose features are sharded."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        return self.finish(_look_up(self, replicated_tokens(self, input), 0))


class InvariantEmbedding(Lowered):
    """An embedding that no style shards."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from ()

    def __call__(self, input: Tensor) -> Tensor:
        return _look_up(self, input, 0)
