"""Sharding of searches and counts of values: searchsorted, bucketize, isin, histc, bincount."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...layout.tensor_meta import TensorMeta
from ..language.local_ops import all_reduced, sharding_axes
from ..language.rule import LocalCall, LocalFunction, OpCall, P, Row, Rule, S, Table, Traffic
from ..language.rule_tables import family


def searchsorted(call: OpCall) -> Iterator[Row]:
    """How many boundaries are below a value is the sum over shards of the boundaries; a sorter has global indices."""
    last, is_tensor = call["sorted_sequence"].ndim - 1, isinstance(call["self"], TensorMeta)
    for d in range(last):  # rows of boundaries belong to rows of values
        yield call.row(sorted_sequence=S(d), self=S(d), sorter=S(d), out=S(d))
    for d in range(last, call["self"].ndim if is_tensor else last):
        yield call.row(self=S(d), out=S(d))
    if call["sorter"] is None:
        yield call.row(sorted_sequence=S(last), out=P("sum"))


def bucketize(call: OpCall) -> Iterator[Row]:
    """As `searchsorted`: how many boundaries are below a value is the sum over shards of the boundaries."""
    if isinstance(call["self"], TensorMeta):
        yield from (call.row(self=S(d), out=S(d)) for d in range(call["self"].ndim))
    yield call.row(boundaries=S(0), out=P("sum"))


def isin(call: OpCall) -> Iterator[Row]:
    """Whether a value is in any shard of the set or, inverted, in none."""
    in_any_shard = P("min" if call["invert"] else "max")
    if isinstance(elements := call.get("elements"), TensorMeta):
        yield from (call.row(elements=S(d), out=S(d)) for d in range(elements.ndim))
    if isinstance(tests := call.get("test_elements"), TensorMeta):
        yield from (call.row(test_elements=S(d), out=in_any_shard) for d in range(tests.ndim))


def histc(call: OpCall) -> Iterator[Row]:
    two_bounds = 2 * call["self"].dtype.itemsize
    traffic: Traffic | None = None if call["min"] != call["max"] else lambda ranks: two_bounds
    yield from (call.row(self=S(d), out=P("sum"), traffic=traffic) for d in range(call["self"].ndim))


def _histc(local_call: LocalCall) -> LocalFunction | None:
    """A count is the sum over shards; without given bounds, those of all elements."""
    call, spec = local_call.call, local_call["self"]
    axes, op, bins = sharding_axes(spec), call.op, call["bins"]
    if not axes or not spec.shape.numel() or call["min"] != call["max"]:
        return None

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        ends = (x.amin(), x.amax()) if x.numel() else (x.new_full((), torch.inf), x.new_full((), -torch.inf))
        both = all_reduced(ends[0], spec, axes, "min"), all_reduced(ends[1], spec, axes, "max")
        low, high = torch.stack(both).tolist()
        # Equal bounds would mean "look them up" again: torch then widens them by one on each side.
        return op(x, bins, low - (low == high), high + (low == high), **kwargs)

    return run


def bincount(call: OpCall) -> Iterator[Row]:
    """The result's length is data-dependent; the largest minimum known is 64 bins."""
    yield call.row(self=S(0), weights=S(0), traffic=lambda ranks: 8 * max(int(call["minlength"]), 64))


def _bincount(local_call: LocalCall) -> LocalFunction | None:
    """Counts of the shard, as many as the shard with the largest value needs, summed over shards."""
    spec, axes = local_call["self"], sharding_axes(local_call["self"])
    if not axes:
        return None

    def run(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        top = x.max() + 1 if x.numel() else torch.zeros((), dtype=x.dtype, device=x.device)
        length = max(minlength, int(all_reduced(top.to(torch.int64), spec, axes, "max").item()))
        counts = torch.bincount(x, weights, length)
        if weights is not None and not x.numel():  # torch counts nothing in integers, with any weights
            counts = counts.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
        return all_reduced(counts, spec, axes)

    return run


SEARCHING: Table = family(
    {
        "searchsorted": Rule(searchsorted),
        "bucketize": Rule(bucketize),
        "isin": Rule(isin),
        "histc": Rule(histc, _histc),
        "bincount.default": Rule(bincount, _bincount, kind="dynamic"),
    }
)
