"""Sharding of embeddings, on one mesh axis: by index, by embedding dim, or by vocabulary (then a partial sum)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..spec import TensorMeta
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
    """By embedding dim; where a maximum was taken, its places have that dim too."""
    order = [a.name for a in call.op._schema.arguments if not a.is_out]
    names = [name for name in order if isinstance(call.get(name), TensorMeta)]
    rest = (R,) * (len(names) - 1)
    cut = ("grad", "maximum_indices") if call["mode"] == MAX else ("grad",)
    if call.get("sparse"):  # no DTensor has that layout
        return []
    rows = [Row((P(op), *rest), (P(op),)) for op in ("sum", "avg")]
    return [*rows, Row(tuple(S(1) if n in cut else R for n in names), (S(1),))]


def _sample_weight_rows(call: OpCall) -> list[Row]:
    """Each is the product of a row of the gradient and one of the vocabulary."""
    rest = (R,) * (len(call.tensors) - 2)
    linear = [Row((*((P(o), R) if i == 0 else (R, P(o))), *rest), (P(o),)) for i in (0, 1) for o in ("sum", "avg")]
    return [Row((S(1), S(1), *rest), (P("sum"),)), Row((R, S(0), *rest), (P("sum"),)), *linear]


def _sample_weights(decided: LocalCall) -> LocalFunction | None:
    """With a cut vocabulary: rows of other ranks are a row of zeros, and so is the padding."""
    weight, call = decided.inputs[1], decided.call
    if not cutting(weight, (0,)):
        return None
    start, size, padding = weight.local_offset[0], weight.local_shape[0], call["padding_idx"]
    alone = replacing(call, padding_idx=-1)

    def run(gradient: Tensor, table: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        mine = indices - start
        mine = mine.masked_fill((mine < 0) | (mine >= size) | (indices == padding), size)
        return alone(gradient, torch.cat([table, table.new_zeros((1, table.shape[1]))]), mine, *args, **kwargs)

    return run


EMBEDDING: Table = family(
    {
        "embedding": Rule(_embedding_rows, _embedding),
        "_embedding_bag _embedding_bag_forward_only": Rule(_bag_rows, _bag),
        "_embedding_bag_dense_backward _embedding_bag_backward": Rule(_bag_gradient_rows),
        "_embedding_bag_per_sample_weights_backward": Rule(_sample_weight_rows, _sample_weights),
        "embedding_dense_backward": Rule(_gradient_rows),
    }
)
