"""Sharding of cumulative operators: a local scan, then every shard takes in the totals of the shards before it.

One element per shard and column is communicated: an all-gather of the shards' totals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_gather
from shoal_mesh.internal import bound, dataclass

from ...layout.spec import Spec
from ..language.local_ops import in_every_form
from ..language.rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table
from ..language.rule_tables import family

aten: Any = torch.ops.aten


def cumulative(call: OpCall) -> Iterator[Row]:
    """Every dim may be sharded; along the scanned one a total per column is gathered."""
    source, dim = call["self"], call.dim()
    columns = prod(n for d, n in enumerate(source.shape) if d != dim)
    total = columns * sum(output.dtype.itemsize for output in call.outputs)
    for d in range(source.ndim):
        yield call.row(self=S(d), out=S(d), traffic=(lambda ranks: total * ranks) if d == dim else None)


def cumsum(call: OpCall) -> Iterator[Row]:
    yield from cumulative(call)
    yield from call.linear("self")


@dataclass(frozen=True, slots=True)
class Scan:
    """A cumulative operator: how totals combine, and the total of nothing."""

    combine: Callable[[Tensor, Tensor], Tensor]
    nothing: float


SUM = Scan(torch.add, 0.0)
PRODUCT = Scan(torch.mul, 1.0)
LOGSUMEXP = Scan(torch.logaddexp, -torch.inf)


def _shards_before(spec: Spec, dim: int) -> int:
    """How many shards are before this rank's."""
    return spec.dim_sharding(dim).index(spec.coordinate or (0,) * spec.mesh.ndim)


def _scanned(scan: Scan) -> Callable[[LocalCall], LocalFunction | None]:
    """A local scan, combined with the totals of the shards before."""

    def local(local_call: LocalCall) -> LocalFunction | None:
        spec, call = local_call["self"], local_call.call
        if not spec.ndim or not (sharding := spec.dim_sharding(dim := call.dim())).axes:
            return None
        before = _shards_before(spec, dim)
        functional = getattr(aten, call.op.__name__.split(".")[0].removesuffix("_")).default

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = functional(x, *args, **kwargs)
            shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
            total = result.narrow(dim, x.shape[dim] - 1, 1) if x.shape[dim] else result.new_full(shape, scan.nothing)
            totals = all_gather(total.contiguous(), spec.mesh.comm(sharding.axes), dim)
            prefix = result.new_full(shape, scan.nothing)
            for shard in range(before):
                prefix = scan.combine(prefix, totals.narrow(dim, shard, 1))
            return scan.combine(result, prefix) if before else bound(result, totals)

        return in_every_form(call, run)

    return local


def _extremes(local_call: LocalCall) -> LocalFunction | None:
    """`cummax` and `cummin`: the running extreme and its index; of equal ones the last, and NaN beats all."""
    spec, call = local_call["self"], local_call.call
    if not spec.ndim or not (sharding := spec.dim_sharding(dim := call.dim())).axes:
        return None
    before, offset = _shards_before(spec, dim), spec.offset(dim)
    largest = "cummax" in call.op.__name__
    functional = aten.cummax.default if largest else aten.cummin.default
    holders = [shard for shard in range(before) if sharding.sizes[shard]]

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        values, indices = functional(x, dim)
        indices += offset
        empty = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
        last = [t.narrow(dim, t.shape[dim] - 1, 1) if t.shape[dim] else t.new_zeros(empty) for t in (values, indices)]
        ends, places = (all_gather(t.contiguous(), spec.mesh.comm(sharding.axes), dim) for t in last)
        for shard in reversed(holders):
            end, place = ends.narrow(dim, shard, 1), places.narrow(dim, shard, 1)
            later = (values >= end if largest else values <= end) & ~_nan(end) | _nan(values)
            values, indices = torch.where(later, values, end), torch.where(later, indices, place)
        return (values, indices) if holders else (bound(values, ends), bound(indices, places))

    return in_every_form(call, run)


def _nan(x: Tensor) -> Tensor:
    return x != x


CUMULATIVE: Table = family(
    {
        "cumsum": Rule(cumsum, _scanned(SUM), sizes=()),
        "cumprod": Rule(cumulative, _scanned(PRODUCT), sizes=()),
        "logcumsumexp": Rule(cumulative, _scanned(LOGSUMEXP), sizes=()),
        "cummax cummin": Rule(cumulative, _extremes),
    }
)
