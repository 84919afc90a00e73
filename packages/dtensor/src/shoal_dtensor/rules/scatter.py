"""Sharding of writes along one dim: the scatter family, index_add, index_copy, index_fill.

The written tensor keeps its cut.  Along the indexed dim every rank writes what falls into its piece; adding is linear,
so cut sources leave a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .bounds import inside
from .local import filling_out
from .rule import LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["SCATTER"]

aten = torch.ops.aten


# --- scatter: an index for every element ------------------------------------------------------------------------------


def _scatter_rows(call: OpCall) -> list[Row]:
    target, index, *source = call.tensors
    if not (target.ndim and index.ndim):
        return []
    dim, rest = call.dim(), (R,) * len(source)
    # A shorter index writes only the first rows of a dim: those pieces would not match.
    alike = [d for d in range(target.ndim) if all(t.shape[d] == target.shape[d] for t in (index, *source))]
    rows = [Row((S(d),) * len(call.tensors), (S(d),)) for d in alike if d != dim]
    return [*rows, Row((S(dim), R, *rest), (S(dim),))]


def _adding_rows(call: OpCall) -> list[Row]:
    """`scatter_add`: linear in target and source together."""
    target, index, source = call.tensors
    rows = [*_scatter_rows(call), Row((P("sum"), R, P("sum")), (P("sum"),))]
    alike = [d for d in range(index.ndim) if index.shape[d] == source.shape[d]] if target.ndim else []
    dims = [d for d in alike if d == call.dim()]
    return rows + [Row((P("sum"), S(d), S(d)), (P("sum"),)) for d in dims]


def _scatter_local(decided: LocalCall) -> LocalFunction | None:
    """What falls outside the piece goes to one more place at its end, which is then cut off."""
    call, spec = decided.call, decided.inputs[0]
    if not spec.ndim or not spec.cuts[dim := call.dim()].axes:
        return None
    functional = _functional(call)
    held = spec.local_shape[dim]

    def run(x: Tensor, dim_: int, index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        at, mine = inside(index, spec, dim)
        spare = x.new_ones((*x.shape[:dim], 1, *x.shape[dim + 1 :]))
        result: Tensor = functional(torch.cat([x, spare], dim), dim, at.masked_fill(~mine, held), *args, **kwargs)
        return result.narrow(dim, 0, held).contiguous()

    return filling_out(call, run)


def _functional(call: OpCall) -> Callable[..., Tensor]:
    """The functional form of an in-place or `out=` scatter operator, of the same overload."""
    name, _, overload = call.op.__name__.partition(".")
    packet = getattr(aten, name.removesuffix("_"))
    kinds = {"out": "default", "src_out": "src", "value_out": "value", "two_out": "two"}
    kinds |= {"reduce_out": "reduce", "value_reduce_out": "value_reduce"}
    found: Callable[..., Tensor] = getattr(packet, kinds.get(overload, overload or "default"))
    return found


# --- index_*: one index for whole slices ------------------------------------------------------------------------------


def _slices_rows(call: OpCall) -> list[Row]:
    target, _, *source = call.tensors
    if not target.ndim:
        return []
    dim, whole = call.dim(), (R,) * len(source)
    others = [d for d in range(target.ndim) if d != dim]
    # `index_fill` has a value without dims where the others have a source.
    rows = [Row((S(d), R, *((S(d),) if "source" in call.bound else whole)), (S(d),)) for d in others]
    return [*rows, Row((S(dim), R, *whole), (S(dim),))]


def _slices_adding_rows(call: OpCall) -> list[Row]:
    """`index_add`: linear in target and source together."""
    target, index, source = call.tensors
    rows = [*_slices_rows(call), Row((P("sum"), R, P("sum")), (P("sum"),))]
    if index.ndim and target.ndim and source.ndim:
        rows.append(Row((P("sum"), S(0), S(call.dim())), (P("sum"),)))
    return rows


def _slices_local(decided: LocalCall) -> LocalFunction | None:
    """Only the slices that fall into the piece are written."""
    call, spec = decided.call, decided.inputs[0]
    if not spec.ndim or not spec.cuts[dim := call.dim()].axes:
        return None
    op, sourced = call.op, "source" in call.bound

    def run(x: Tensor, dim_: int, index: Tensor, value: Any, **kwargs: Any) -> Any:
        at, mine = inside(index.reshape(-1), spec, dim)
        if sourced:
            wide = value if value.ndim else value.reshape([1] * x.ndim)
            value = wide.index_select(dim, mine.nonzero().squeeze(1))
        return op(x, dim, at[mine], value, **kwargs)

    return run


SCATTER: Table = family(
    {
        "scatter.src scatter.value scatter.reduce scatter.value_reduce": Rule(_scatter_rows, _scatter_local),
        "scatter_.src scatter_.value scatter_.reduce scatter_.value_reduce": Rule(_scatter_rows, _scatter_local),
        "scatter.src_out scatter.value_out scatter.reduce_out": Rule(_scatter_rows, _scatter_local),
        "scatter_reduce": Rule(_scatter_rows, _scatter_local),
        "scatter_add": Rule(_adding_rows, _scatter_local),
        "index_add": Rule(_slices_adding_rows, _slices_local),
        "index_copy": Rule(_slices_rows, _slices_local),
        "index_fill": Rule(_slices_rows, _slices_local),
    }
)
