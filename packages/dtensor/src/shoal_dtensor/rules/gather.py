"""Sharding of lookups along one dim: gather, index_select.

Along the dim itself every rank looks up what falls into its piece and leaves zeros for the rest, a partial sum;
a cut index gives a cut result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .bounds import inside
from .rule import LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family
from .view import any_partial

__all__ = ["GATHER"]

aten = torch.ops.aten


def _made(call: OpCall) -> P:
    return P("max" if call.tensors[0].dtype == torch.bool else "sum")


def _partial_rows() -> list[Row]:
    return [Row((row.inputs[0], R), row.outputs) for row in any_partial(1, 1)]


def _gather_rows(call: OpCall) -> list[Row]:
    source, index = call.tensors
    if not (source.ndim and index.ndim):
        return _partial_rows()
    dim = call.dim()
    # gather reads only the first rows of a dim in which the index is shorter: those pieces would not match.
    both = [d for d in range(source.ndim) if d != dim and source.shape[d] == index.shape[d]]
    rows = [Row((S(d), S(d)), (S(d),)) for d in both]
    rows += [Row((R, S(dim)), (S(dim),)), Row((S(dim), R), (_made(call),))]
    return rows + _partial_rows()


def _select_rows(call: OpCall) -> list[Row]:
    source, index = call.tensors
    if not source.ndim:
        return _partial_rows()
    dim = call.dim()
    rows = [Row((S(d), R), (S(d),)) for d in range(source.ndim) if d != dim]
    rows += [Row((R, S(0)), (S(dim),))] if index.ndim else []
    return [*rows, Row((S(dim), R), (_made(call),)), *_partial_rows()]


def _local(decided: LocalCall) -> LocalFunction | None:
    call, spec, shape = decided.call, decided.inputs[0], decided.outputs[0].local_shape
    if not spec.ndim or not spec.cuts[dim := call.dim()].axes:
        return None
    wide = "gather" in call.op.__name__

    def run(x: Tensor, dim_: int, index: Tensor, **kwargs: Any) -> Tensor:
        at, mine = inside(index, spec, dim)
        if not wide:
            mine = mine.reshape(-1, *[1] * (spec.ndim - dim - 1))
        if 0 in x.shape:
            found = x.new_zeros(shape)
        else:
            found = (aten.gather.default if wide else aten.index_select.default)(x, dim, at).masked_fill_(~mine, 0)
        return kwargs["out"].copy_(found) if "out" in kwargs else found

    return run


GATHER: Table = family(
    {
        "gather": Rule(_gather_rows, _local),
        "index_select": Rule(_select_rows, _local),
    }
)
