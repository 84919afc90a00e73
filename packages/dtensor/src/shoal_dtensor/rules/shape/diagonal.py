"""Sharding of diagonals and triangles: rows and columns may be sharded; a rank has what crosses its shard.

Of a diagonal that is a view.  Where rows and columns are sharded, by different mesh axes, an element is held by the
rank whose rows and columns both have it: of a (4, 4) matrix on 2 x 2 ranks, two ranks hold the diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from shoal_mesh.internal import dataclass

from ..language.local_ops import with_arguments
from ..language.rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table
from ..language.rule_tables import family
from .slice_maps import SliceMap
from .views import rearrangement, same_dims, with_input_sizes

aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class DiagonalMap(SliceMap):
    """The rows, or columns, that a diagonal crosses; sharded by both, a shard is what they share."""

    intersects: ClassVar[bool] = True


def diagonal(call: OpCall) -> Iterator[Row]:
    one, two, offset = call.dim("dim1"), call.dim("dim2"), call["offset"]
    last, length = call.outputs[0].ndim - 1, call.outputs[0].shape[-1]
    for d, start in ((one, max(0, -offset)), (two, max(0, offset))):
        yield call.row(self=S(d), out=S(last, map=DiagonalMap(start, start + length)))
    others = [d for d in range(call["self"].ndim) if d not in (one, two)]
    yield from same_dims(call, ((d, i) for i, d in enumerate(others)))


def _diagonal(local_call: LocalCall) -> LocalFunction | None:
    """The diagonal of the shard that is on the global diagonal."""
    call, spec = local_call.call, local_call["self"]
    one, two = call.dim("dim1"), call.dim("dim2")
    if spec.coordinate is None or not (spec.dim_shardings[one].axes or spec.dim_shardings[two].axes):
        return None
    row, column = (spec.dim_sharding(d).interval(spec.coordinate)[0] for d in (one, two))
    offset = call["offset"] + row - column
    shape = local_call.outputs[0].local_shape
    if not shape[-1]:
        return lambda x, *args: x.new_empty(shape)
    return lambda x, *args: x.diagonal(offset, one, two)


def diagonal_backward(call: OpCall) -> Iterator[Row]:
    ndim = len(call["input_sizes"])
    matrix = {int(call["dim1"]) % ndim, int(call["dim2"]) % ndim}
    others = [d for d in range(ndim) if d not in matrix]
    yield from same_dims(call, enumerate(others), "grad_output")
    yield from call.linear("grad_output")


def diagonal_scatter(call: OpCall) -> Iterator[Row]:
    one, two = call.dim("dim1"), call.dim("dim2")
    others = [d for d in range(call["self"].ndim) if d not in (one, two)]
    yield from (call.row(self=S(d), src=S(i), out=S(d)) for i, d in enumerate(others))
    yield from call.keeping_partials("self", "src")


def diag_embed(call: OpCall) -> Iterator[Row]:
    ndim = call.outputs[0].ndim
    matrix = {int(call["dim1"]) % ndim, int(call["dim2"]) % ndim}
    yield from same_dims(call, enumerate(d for d in range(ndim) if d not in matrix))
    yield from call.linear("self")


def tril(call: OpCall) -> Iterator[Row]:
    yield from same_dims(call, ((d, d) for d in range(call["self"].ndim)))
    yield from call.linear("self")


def _tril(local_call: LocalCall) -> LocalFunction | None:
    """The global diagonal, as the shard that starts at (row, column) counts it."""
    row, column = local_call["self"].local_offset[-2:]
    return (
        None if row == column else with_arguments(local_call.call, diagonal=local_call.call["diagonal"] + row - column)
    )


DIAGONAL: Table = {
    aten.diagonal.default: rearrangement(diagonal, _diagonal),
    aten.diagonal_backward.default: Rule(diagonal_backward, with_input_sizes, skip_empty=True),
} | family(
    {
        "diagonal_scatter": Rule(diagonal_scatter),
        "diag_embed": Rule(diag_embed),
        "tril triu": Rule(tril, _tril),
    }
)
