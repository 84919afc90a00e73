"""Sharding of operators whose result's length depends on data: nonzero, unique, and those of `mask.py`.

Each rank finds its own results; everyone gathers them all, so the result is replicated and as long as on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .found import few, gathered, ordered, with_offset
from .local import cutting
from .rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from .table import family

__all__ = ["DYNAMIC"]

aten = torch.ops.aten


# --- nonzero --------------------------------------------------------------------------------------------------------


def _nonzero_rows(call: OpCall) -> list[Row]:
    return [Row((S(d),), (R,), traffic=few(call)) for d in range(call.tensors[0].ndim)]


def _nonzero_local(decided: LocalCall) -> LocalFunction | None:
    (spec,), axes = decided.inputs, cutting(decided.inputs[0])
    if not axes:
        return None
    return lambda x: ordered(spec, axes, with_offset(spec, x.nonzero()))[0]


# --- unique -----------------------------------------------------------------------------------------------------------


def _unique_rows(call: OpCall) -> list[Row]:
    """Where each element went (`return_inverse`) is as large as the input: then it is gathered."""
    if call.get("return_inverse"):
        return []
    outputs = (R,) * len(call.op._schema.returns)
    return [Row((S(d),), outputs, traffic=few(call)) for d in range(call.tensors[0].ndim)]


def _unique_local(decided: LocalCall) -> LocalFunction | None:
    (spec,), axes = decided.inputs, cutting(decided.inputs[0])
    if not axes:
        return None
    counted, triple = bool(decided.call.get("return_counts")), len(decided.call.op._schema.returns) == 3

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        values, counts = torch.unique(x, return_counts=True)
        values, counts = gathered(spec, axes, values, counts)
        values, inverse = torch.unique(values, return_inverse=True)
        total = torch.zeros(len(values), dtype=counts.dtype, device=x.device).index_add_(0, inverse, counts)
        nothing = x.new_empty(0, dtype=torch.int64)
        return (values, nothing, total if counted else nothing)[: 3 if triple else 2]

    return run


DYNAMIC: Table = {
    aten.nonzero.default: Rule(_nonzero_rows, _nonzero_local, dynamic=True),
} | family(
    {
        "_unique2.default _unique.default": Rule(_unique_rows, _unique_local, dynamic=True),
        # Neighbours and whole slices are compared: every element on every rank.
        "unique_dim.default unique_consecutive.default repeat_interleave.Tensor": Rule(lambda call: [], dynamic=True),
        "nonzero_static.default": Rule(lambda call: []),
        # No DTensor has a sparse layout: what `wrap_dynamic` gives is a plain tensor, the same on every rank.
        "_to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc": Rule(lambda call: [], dynamic=True),
    }
)
