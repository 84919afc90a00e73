"""Sharding of embeddings, on one mesh axis: by index, by embedding dim, or by vocabulary (then a partial sum)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .local import cutting, filling_out
from .rule import LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["EMBEDDING"]


def _embedding_rows(call: OpCall) -> list[Row]:
    _weight, indices = call.tensors
    rows = [Row((R, S(d)), (S(d),)) for d in range(indices.ndim)]
    rows += [Row((S(1), R), (S(indices.ndim),)), Row((S(0), R), (P("sum"),))]
    return rows + [Row((P(op), R), (P(op),)) for op in ("sum", "avg")]


def _embedding(decided: LocalCall) -> LocalFunction | None:
    """With a cut vocabulary: rows that other ranks hold are zero."""
    weight = decided.inputs[0]
    if not cutting(weight, (0,)):
        return None
    start, size = weight.local_offset[0], weight.local_shape[0]

    def run(table: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
        if not size:
            return table.new_zeros((*indices.shape, table.shape[1]))
        mine = indices - start
        outside = (mine < 0) | (mine >= size)
        found = torch.ops.aten.embedding(table, mine.masked_fill(outside, 0))
        return found.masked_fill_(outside.unsqueeze(-1), 0)

    return filling_out(decided.call, run)


def _gradient_rows(call: OpCall) -> list[Row]:
    gradient, indices = call.tensors
    rows = [Row((S(gradient.ndim - 1), R), (S(1),)), Row((R, R), (S(0),))]
    rows += [Row((P(op), R), (P(op),)) for op in ("sum", "avg")]
    if not call["scale_grad_by_freq"]:
        rows += [Row((S(d), S(d)), (P("sum"),)) for d in range(indices.ndim)]
    return rows


def _gradient(decided: LocalCall) -> LocalFunction | None:
    """With a cut vocabulary: only the rows that this rank holds."""
    made = decided.outputs[0]
    if not cutting(made, (0,)):
        return None
    start, size, padding = made.local_offset[0], made.local_shape[0], decided.call["padding_idx"]
    by_frequency = decided.call["scale_grad_by_freq"]

    def run(gradient: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
        mine = indices - start
        skipped = (mine < 0) | (mine >= size) | (indices == padding)
        mine = mine.masked_fill(skipped, size)
        return torch.ops.aten.embedding_dense_backward(gradient, mine, size + 1, size, by_frequency)[:size]

    return filling_out(decided.call, run)


EMBEDDING: Table = family(
    {
        "embedding": Rule(_embedding_rows, _embedding),
        "embedding_dense_backward": Rule(_gradient_rows, _gradient),
    }
)
