"""Sharding of diagonals: rows and columns may be cut; a rank has of the diagonal what crosses its box, as a view.

Where both are cut, by different mesh axes, an element lies with the rank whose rows and columns both have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .notation import linear_rows
from .rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table
from .view import kept_dims, rearrangement, with_input_sizes
from .window import Window

__all__ = ["DIAGONAL"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Crossing(Window):
    """The rows, or columns, that a diagonal crosses; pieces by rows and by columns are what they share."""

    meets: ClassVar[bool] = True


def _rows(call: OpCall) -> list[Row]:
    one, two, offset = call.dim("dim1"), call.dim("dim2"), call["offset"]
    last, length = call.outputs[0].ndim - 1, call.outputs[0].shape[-1]
    others = [d for d in range(call.tensors[0].ndim) if d not in (one, two)]
    starts = ((one, max(0, -offset)), (two, max(0, offset)))
    crossed = [Row((S(d),), (S(last, cut=Crossing(start, start + length)),)) for d, start in starts]
    return crossed + kept_dims((d, i) for i, d in enumerate(others))


def _local(decided: LocalCall) -> LocalFunction | None:
    call, spec = decided.call, decided.inputs[0]
    one, two = call.dim("dim1"), call.dim("dim2")
    if spec.coordinate is None or not (spec.cuts[one].axes or spec.cuts[two].axes):
        return None
    row, column = (spec.cut(d).interval(spec.coordinate)[0] for d in (one, two))
    offset = call["offset"] + row - column
    shape = decided.outputs[0].local_shape
    if not shape[-1]:
        return lambda x, *args: x.new_empty(shape)
    return lambda x, *args: x.diagonal(offset, one, two)


def _backward_rows(call: OpCall) -> list[Row]:
    ndim = len(call["input_sizes"])
    one, two = int(call["dim1"]) % ndim, int(call["dim2"]) % ndim
    others = [d for d in range(ndim) if d not in (one, two)]
    return kept_dims((i, d) for i, d in enumerate(others)) + linear_rows((0,), 1, 1)


DIAGONAL: Table = {
    aten.diagonal.default: rearrangement(_rows, _local),
    aten.diagonal_backward.default: Rule(_backward_rows, with_input_sizes),
}
