"""Sharding of searches and counts of values: searchsorted, bucketize, isin, histc, bincount.

How many boundaries lie below a value is a sum over the pieces of the boundaries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .local import across, cutting
from .rule import LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["SEARCH"]

aten = torch.ops.aten


def _searchsorted_rows(call: OpCall) -> list[Row]:
    """Values may be cut; so may the boundaries, unless a sorter says where they are."""
    boundaries, *others = call.tensors
    values = others[0] if isinstance(call["self"], tuple) else None
    last, sorter = boundaries.ndim - 1, call["sorter"] is not None
    rest = (R,) * (len(others) - (values is not None))
    rows = []
    if values is not None and last == 0:
        rows = [Row((R, S(d), *rest), (S(d),)) for d in range(values.ndim)]
    elif values is not None:
        rows = [Row((S(d), S(d), *[S(d)] * sorter), (S(d),)) for d in range(last)]
        rows.append(Row((R, S(last), *rest), (S(last),)))
    return rows if sorter else [*rows, Row((S(last), *[R] * len(others)), (P("sum"),))]


def _bucketize_rows(call: OpCall) -> list[Row]:
    if len(call.tensors) == 1:
        return [Row((S(0),), (P("sum"),))]
    return [Row((S(d), R), (S(d),)) for d in range(call.tensors[0].ndim)] + [Row((R, S(0)), (P("sum"),))]


def _isin_rows(call: OpCall) -> list[Row]:
    """Whether a value is in the set: in any piece of the set (or, inverted, in none)."""
    made = P("min" if call["invert"] else "max")
    elements = (
        call.tensors[0] if isinstance(call["elements" if "elements" in call.bound else "element"], tuple) else None
    )
    tests = call.tensors[-1] if len(call.tensors) > (elements is not None) else None
    rows = []
    if elements is not None:
        rows = [Row((S(d), *[R] * (len(call.tensors) - 1)), (S(d),)) for d in range(elements.ndim)]
    if tests is not None:
        rows += [Row((*[R] * (len(call.tensors) - 1), S(d)), (made,)) for d in range(tests.ndim)]
    return rows


def _histc_rows(call: OpCall) -> list[Row]:
    (source,) = call.tensors
    traffic = 0 if call["min"] != call["max"] else 2 * source.dtype.itemsize
    return [Row((S(d),), (P("sum"),), traffic=traffic) for d in range(source.ndim)]


def _histc_local(decided: LocalCall) -> LocalFunction | None:
    """Without given bounds, those of all elements."""
    call, (spec,) = decided.call, decided.inputs
    low, high, axes, bins = call["min"], call["max"], cutting(spec), call["bins"]
    if not axes or not spec.shape.numel():
        return None
    op = call.op

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if low != high:
            return op(x, bins, low, high, **kwargs)
        ends = (x.amin(), x.amax()) if x.numel() else (x.new_full((), torch.inf), x.new_full((), -torch.inf))
        first, last = across(ends[0], spec, axes, "min"), across(ends[1], spec, axes, "max")
        # Equal bounds would mean "look them up" again: torch then widens them by one on each side.
        return op(
            x, bins, *((first.item() - 1, last.item() + 1) if first == last else (first.item(), last.item())), **kwargs
        )

    return run


# --- bincount ---------------------------------------------------------------------------------------------------------


def _bincount_rows(call: OpCall) -> list[Row]:
    return [Row((S(0),) * len(call.tensors), (R,), traffic=8 * max(int(call["minlength"]), 64))]


def _bincount_local(decided: LocalCall) -> LocalFunction | None:
    """Counts of the piece, as long as the longest of all pieces, summed."""
    spec, axes = decided.inputs[0], cutting(decided.inputs[0])
    if not axes:
        return None

    def run(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        top = x.max() + 1 if x.numel() else torch.zeros((), dtype=x.dtype, device=x.device)
        length = max(minlength, int(across(top.to(torch.int64), spec, axes, "max").item()))
        counts = torch.bincount(x, weights, length)
        if weights is not None and not x.numel():  # torch counts nothing in integers, whatever the weights
            counts = counts.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
        return across(counts, spec, axes)

    return run


SEARCH: Table = family(
    {
        "searchsorted": Rule(_searchsorted_rows),
        "bucketize": Rule(_bucketize_rows),
        "isin": Rule(_isin_rows),
        "histc": Rule(_histc_rows, _histc_local),
        "bincount.default": Rule(_bincount_rows, _bincount_local, dynamic=True),
    }
)
