"""Sharding of embeddings, on one mesh axis: by index, by embedding dim, or by vocabulary (then a partial sum)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .local import cutting, filling_out, replacing
from .rule import LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["EMBEDDING"]


MAX = 2  # the mode of `embedding_bag`


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
        found: Tensor = torch.ops.aten.embedding(table, mine.masked_fill(outside, 0))
        return found.masked_fill_(outside.unsqueeze(-1), 0)

    return filling_out(decided.call, run)


def _gradient_rows(call: OpCall) -> list[Row]:
    gradient, indices = call.tensors
    rows = [Row((S(gradient.ndim - 1), R), (S(1),))]
    rows += [Row((P(op), R), (P(op),)) for op in ("sum", "avg")]
    if not call["scale_grad_by_freq"]:
        rows += [Row((S(d), S(d)), (P("sum"),)) for d in range(indices.ndim)]
    return rows


def _bag_rows(call: OpCall) -> list[Row]:
    """`embedding_bag`: by embedding dim; by vocabulary unless a maximum is taken."""
    rest = (R,) * (len(call.tensors) - 1)
    most = S(1) if call["mode"] == MAX else R
    rows = [Row((S(1), *rest), (S(1), R, R, most))]
    return rows if call["mode"] == MAX else [*rows, Row((S(0), *rest), (P("sum"), R, R, R))]


def _bag(decided: LocalCall) -> LocalFunction | None:
    """With a cut vocabulary: rows of other ranks are a row of zeros, padding a second one that is not counted."""
    weight, call = decided.inputs[0], decided.call
    if not cutting(weight, (0,)):
        return None
    start, size, padding = weight.local_offset[0], weight.local_shape[0], call["padding_idx"]
    bagged = replacing(call, padding_idx=size + 1)

    def run(table: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        mine = indices - start
        mine = mine.masked_fill((mine < 0) | (mine >= size), size).masked_fill(indices == padding, size + 1)
        return bagged(torch.cat([table, table.new_zeros((2, table.shape[1]))]), mine, *args, **kwargs)

    return run


def _bag_gradient_rows(call: OpCall) -> list[Row]:
    rest = (R,) * (len(call.tensors) - 1)
    rows = [Row((P(op), *rest), (P(op),)) for op in ("sum", "avg")]
    return rows if call["mode"] == MAX else [*rows, Row((S(1), *rest), (S(1),))]


EMBEDDING: Table = family(
    {
        "embedding": Rule(_embedding_rows, _embedding),
        "_embedding_bag _embedding_bag_forward_only": Rule(_bag_rows, _bag),
        "_embedding_bag_dense_backward": Rule(_bag_gradient_rows),
        "embedding_dense_backward": Rule(_gradient_rows),
    }
)
