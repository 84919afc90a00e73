"""Sharding of cumulative operators: a local scan, then every piece takes in the totals of the pieces before it.

Only one element per piece and column travels: all-gather of the pieces' totals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_gather

from ..spec import Spec
from .local import filling_out
from .notation import linear_rows
from .rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table
from .table import family

__all__ = ["SCAN"]

aten = torch.ops.aten


def _scan_rows(call: OpCall) -> list[Row]:
    """Every dim may be cut; along the scanned one a total per column is gathered."""
    (source,), count = call.tensors, len(call.outputs)
    dim = call.dim()
    columns = prod(n for d, n in enumerate(source.shape) if d != dim)
    traffic = columns * sum(output.dtype.itemsize for output in call.outputs)
    return [Row((S(d),), (S(d),) * count, traffic=traffic if d == dim else 0) for d in range(source.ndim)]


@dataclass(frozen=True, slots=True)
class Scan:
    """A cumulative operator: how totals combine, and the total of nothing."""

    combine: Callable[[Tensor, Tensor], Tensor]
    nothing: float


SUM = Scan(torch.add, 0.0)
PRODUCT = Scan(torch.mul, 1.0)
LOGSUMEXP = Scan(torch.logaddexp, -torch.inf)


def _before(spec: Spec, dim: int) -> int:
    """How many pieces stand before this rank's."""
    return spec.cut(dim).index(spec.coordinate or (0,) * spec.mesh.ndim)


def _scanned(scan: Scan) -> Callable[[LocalCall], LocalFunction | None]:
    def local(decided: LocalCall) -> LocalFunction | None:
        (spec,), call = decided.inputs, decided.call
        if not spec.ndim or not (cut := spec.cut(dim := call.dim())).axes:
            return None
        before, functional = _before(spec, dim), getattr(aten, call.op.__name__.split(".")[0].removesuffix("_")).default

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = functional(x, *args, **kwargs)
            shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
            total = result.narrow(dim, x.shape[dim] - 1, 1) if x.shape[dim] else result.new_full(shape, scan.nothing)
            totals = all_gather(total.contiguous(), spec.mesh.comm(cut.axes), dim)
            prefix = result.new_full(shape, scan.nothing)
            for piece in range(before):
                prefix = scan.combine(prefix, totals.narrow(dim, piece, 1))
            return scan.combine(result, prefix) if before else result

        return filling_out(call, run)

    return local


def _extremes(decided: LocalCall) -> LocalFunction | None:
    """`cummax` and `cummin`: the running extreme and where it is; of equal ones the last, and NaN beats all."""
    (spec,), call = decided.inputs, decided.call
    if not spec.ndim or not (cut := spec.cut(dim := call.dim())).axes:
        return None
    before, offset = _before(spec, dim), spec.offset(dim)
    largest = "cummax" in call.op.__name__
    functional = aten.cummax.default if largest else aten.cummin.default
    holders = [piece for piece in range(before) if cut.sizes[piece]]

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        values, indices = functional(x, dim)
        indices += offset
        empty = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
        last = [t.narrow(dim, t.shape[dim] - 1, 1) if t.shape[dim] else t.new_zeros(empty) for t in (values, indices)]
        ends, places = (all_gather(t.contiguous(), spec.mesh.comm(cut.axes), dim) for t in last)
        for piece in reversed(holders):
            end, place = ends.narrow(dim, piece, 1), places.narrow(dim, piece, 1)
            later = (values >= end if largest else values <= end) & ~_nan(end) | _nan(values)
            values, indices = torch.where(later, values, end), torch.where(later, indices, place)
        return values, indices

    return filling_out(call, run)


def _nan(x: Tensor) -> Tensor:
    return x != x


def _summed_rows(call: OpCall) -> list[Row]:
    return _scan_rows(call) + linear_rows((0,), 1, 1)


SCAN: Table = family(
    {
        "cumsum": Rule(_summed_rows, _scanned(SUM)),
        "cumprod": Rule(_scan_rows, _scanned(PRODUCT)),
        "logcumsumexp": Rule(_scan_rows, _scanned(LOGSUMEXP)),
        "cummax cummin": Rule(_scan_rows, _extremes),
    }
)
