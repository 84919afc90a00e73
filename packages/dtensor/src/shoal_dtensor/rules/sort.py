"""Sharding of operators that need whole columns: sort, topk, median and their like.

Along a cut dim the pieces turn into whole columns and back (`column.py`); `topk` and `kthvalue` gather
each piece's candidates instead, which are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_gather_v

from .column import by_columns, gathered_columns
from .local import filling_out
from .rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from .table import family
from .view import kept_dims

__all__ = ["SORT"]

aten = torch.ops.aten


def _moved(call: OpCall) -> int:
    """Bytes per rank when pieces turn into columns and results back; a rule does not know the ranks, so say four."""
    tensors = (*call.tensors, *call.outputs)
    return sum(prod(t.shape) * t.dtype.itemsize for t in tensors) // 8


def _others(call: OpCall, dim: int) -> list[Row]:
    """The other dims, which results keep unless the call drops `dim`."""
    ndim, count = call.tensors[0].ndim, len(call.outputs)
    dropped = call.outputs[0].ndim < ndim
    return kept_dims(((d, d - (dropped and d > dim)) for d in range(ndim) if d != dim), count)


def _arguments(call: OpCall, *names: str) -> dict[str, Any]:
    return {name: call[name] for name in names if name in call.bound}


# --- sort -------------------------------------------------------------------------------------------------------------


def _sort_rows(call: OpCall) -> list[Row]:
    if not call.tensors[0].ndim:
        return []
    dim = call.dim()
    return [*_others(call, dim), Row((S(dim),), (S(dim),) * len(call.outputs), traffic=_moved(call), ordered=True)]


def _sort_local(decided: LocalCall) -> LocalFunction | None:
    call, (spec,) = decided.call, decided.inputs
    if not spec.ndim or not spec.cuts[dim := call.dim()].axes:
        return None
    named = {"stable": True} | _arguments(call, "descending")

    def whole(columns: Tensor) -> Sequence[Tensor]:
        return torch.sort(columns, dim=-1, **named)

    turned = by_columns(spec, dim, decided.outputs, whole)
    return filling_out(call, lambda x, *args, **kwargs: tuple(turned(x)))


# --- one value per column ---------------------------------------------------------------------------------------------


def _column_rows(call: OpCall) -> list[Row]:
    if not call.tensors[0].ndim or "dim" not in call.bound:
        return []
    dim = call.dim()
    return [*_others(call, dim), Row((S(dim),), (R,) * len(call.outputs), traffic=_moved(call))]


def _column_local(decided: LocalCall) -> LocalFunction | None:
    """`median`, `nanmedian`, `mode`, `kthvalue` of a cut dim."""
    call, (spec,) = decided.call, decided.inputs
    if not spec.ndim or "dim" not in call.bound or not spec.cuts[dim := call.dim()].axes:
        return None
    function, named = getattr(torch, call.op.__name__.split(".")[0]), _arguments(call, "k")
    turned = gathered_columns(spec, dim, lambda x: function(x, dim=-1, **named), keepdim=bool(call["keepdim"]))
    return filling_out(call, lambda x, *args, **kwargs: tuple(turned(x)))


# --- topk -------------------------------------------------------------------------------------------------------------


def _topk_rows(call: OpCall) -> list[Row]:
    source = call.tensors[0]
    if not source.ndim:
        return []
    dim, result = call.dim(), call.outputs[0]
    candidates = prod(result.shape) * (result.dtype.itemsize + 8)
    return [*_others(call, dim), Row((S(dim),), (R, R), traffic=candidates)]


def _topk_local(decided: LocalCall) -> LocalFunction | None:
    call, (spec,) = decided.call, decided.inputs
    if not spec.ndim or not (cut := spec.cut(dim := call.dim())).axes:
        return None
    k, offset, named = int(call["k"]), spec.offset(dim), _arguments(call, "largest", "sorted")
    sizes = [min(k, n) for n in cut.sizes]
    mine = min(k, spec.local_shape[dim])

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(x, mine, dim, **named)
        comm = spec.mesh.comm(cut.axes)
        values = all_gather_v(values.contiguous(), comm, sizes, dim)
        indices = all_gather_v((indices + offset).contiguous(), comm, sizes, dim)
        values, chosen = torch.topk(values, k, dim, **named)
        return values, indices.gather(dim, chosen)

    return filling_out(call, run)


SORT: Table = family(
    {
        "sort.default sort.stable sort.values sort.values_stable": Rule(_sort_rows, _sort_local),
        "median nanmedian mode kthvalue": Rule(_column_rows, _column_local),
        "topk": Rule(_topk_rows, _topk_local),
    }
)
