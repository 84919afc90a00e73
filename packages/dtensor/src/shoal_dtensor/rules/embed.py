"""Sharding of writes into a part, out of place: slice_scatter, select_scatter, diagonal_scatter, diag_embed.

Along the dim of the part, every rank replaces what lies in its piece.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .local import filling_out
from .rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from .table import family
from .view import any_partial, kept_dims
from .window import local_bounds, window_of

__all__ = ["EMBED"]

aten = torch.ops.aten


def _slice_rows(call: OpCall) -> list[Row]:
    dim, ndim = call.dim(), call.tensors[0].ndim
    others = [Row((S(d), S(d)), (S(d),)) for d in range(ndim) if d != dim]
    return [*others, Row((S(dim), R), (S(dim),)), *any_partial(2, 1)]


def _slice_local(decided: LocalCall) -> LocalFunction | None:
    call, spec = decided.call, decided.inputs[0]
    dim = call.dim()
    if not spec.cuts[dim].axes:
        return None
    window, start, held = window_of(call, spec.shape[dim]), spec.offset(dim), spec.local_shape[dim]
    first = window.before(start)
    count = window.before(start + held) - first
    bounds = local_bounds(window, start, count)

    def run(x: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        return aten.slice_scatter.default(x, source.narrow(dim, first, count), dim, *bounds)

    return filling_out(call, run)


def _select_rows(call: OpCall) -> list[Row]:
    dim, ndim = call.dim(), call.tensors[0].ndim
    others = [Row((S(d), S(d - (d > dim))), (S(d),)) for d in range(ndim) if d != dim]
    return [*others, Row((S(dim), R), (S(dim),)), *any_partial(2, 1)]


def _select_local(decided: LocalCall) -> LocalFunction | None:
    call, spec = decided.call, decided.inputs[0]
    dim = call.dim()
    if not spec.cuts[dim].axes:
        return None
    at = call["index"] % spec.shape[dim] - spec.offset(dim)
    if not 0 <= at < spec.local_shape[dim]:
        return filling_out(call, lambda x, *args, **kwargs: x.clone())
    return filling_out(call, lambda x, source, *args, **kwargs: aten.select_scatter.default(x, source, dim, at))


def _diagonal_rows(call: OpCall) -> list[Row]:
    one, two, ndim = call.dim("dim1"), call.dim("dim2"), call.tensors[0].ndim
    others = [d for d in range(ndim) if d not in (one, two)]
    return [Row((S(d), S(i)), (S(d),)) for i, d in enumerate(others)] + any_partial(2, 1)


def _diag_embed_rows(call: OpCall) -> list[Row]:
    ndim = call.outputs[0].ndim
    taken = {int(call["dim1"]) % ndim, int(call["dim2"]) % ndim}
    others = [d for d in range(ndim) if d not in taken]
    return kept_dims(enumerate(others)) + any_partial(1, 1, ("sum", "avg"))


EMBED: Table = family(
    {
        "slice_scatter": Rule(_slice_rows, _slice_local),
        "select_scatter": Rule(_select_rows, _select_local),
        "diagonal_scatter": Rule(_diagonal_rows),
        "diag_embed": Rule(_diag_embed_rows),
    }
)
