"""Sharding of operators that need complete columns: sort, topk, median and their like.

Along a sharded dim the shards are exchanged for complete columns and back (`exchange/transpose.py`); `topk` gathers
each shard's candidates instead, which are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_gather_v

from ..exchange.transpose import by_columns, gathered_columns
from ..language.local_ops import bytes_of, in_every_form
from ..language.rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table, Traffic
from ..language.rule_tables import family


def _exchanged(call: OpCall) -> Traffic:
    """Input and outputs are what all ranks together send when shards become columns and results shards."""
    return lambda ranks: bytes_of(*call.tensors, *call.outputs) / ranks


def _other_dims(call: OpCall, dim: int) -> Iterator[Row]:
    """The other dims, which results keep unless the call drops `dim`."""
    ndim = call["self"].ndim
    dropped = call.outputs[0].ndim < ndim
    yield from (call.row(self=S(d), out=S(d - (dropped and d > dim))) for d in range(ndim) if d != dim)


def _arguments(call: OpCall, *names: str) -> dict[str, Any]:
    return {name: call[name] for name in names if name in call.bound}


# --- sort -------------------------------------------------------------------------------------------------------------


def sort(call: OpCall) -> Iterator[Row]:
    if call["self"].ndim:
        dim = call.dim()
        yield from _other_dims(call, dim)
        yield call.row(self=S(dim), out=S(dim), traffic=_exchanged(call), ordered=True)


def _sort(local_call: LocalCall) -> LocalFunction | None:
    """Each rank sorts some complete columns."""
    call, spec = local_call.call, local_call["self"]
    if not spec.ndim or not spec.dim_shardings[dim := call.dim()].axes:
        return None
    named = {"stable": True} | _arguments(call, "descending")

    def sort_columns(columns: Tensor) -> Sequence[Tensor]:
        return torch.sort(columns, dim=-1, **named)

    run = by_columns(spec, dim, local_call.outputs, sort_columns)
    return in_every_form(call, lambda x, *args, **kwargs: tuple(run(x)))


# --- one value per column ---------------------------------------------------------------------------------------------


def median(call: OpCall) -> Iterator[Row]:
    if call["self"].ndim and "dim" in call.bound:
        dim = call.dim()
        yield from _other_dims(call, dim)
        yield call.row(self=S(dim), traffic=_exchanged(call))


def _median(local_call: LocalCall) -> LocalFunction | None:
    """Each rank has some complete columns; every rank gathers what all of them give."""
    call, spec = local_call.call, local_call["self"]
    if not spec.ndim or "dim" not in call.bound or not spec.dim_shardings[dim := call.dim()].axes:
        return None
    function, named = getattr(torch, call.op.__name__.split(".")[0]), _arguments(call, "k")
    run = gathered_columns(spec, dim, lambda x: function(x, dim=-1, **named), keepdim=bool(call["keepdim"]))
    return in_every_form(call, lambda x, *args, **kwargs: tuple(run(x)))


# --- topk -------------------------------------------------------------------------------------------------------------


def topk(call: OpCall) -> Iterator[Row]:
    if call["self"].ndim:
        dim, values = call.dim(), call.outputs[0]
        candidates = prod(values.shape) * (values.dtype.itemsize + 8)
        yield from _other_dims(call, dim)
        yield call.row(self=S(dim), traffic=lambda ranks: candidates * (ranks - 1))


def _topk(local_call: LocalCall) -> LocalFunction | None:
    """The k best of the k best of each shard."""
    call, spec = local_call.call, local_call["self"]
    if not spec.ndim or not (sharding := spec.dim_sharding(dim := call.dim())).axes:
        return None
    k, offset, named = int(call["k"]), spec.offset(dim), _arguments(call, "largest", "sorted")
    sizes = [min(k, n) for n in sharding.sizes]
    held = min(k, spec.local_shape[dim])

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(x, held, dim, **named)
        comm = spec.mesh.comm(sharding.axes)
        values = all_gather_v(values.contiguous(), comm, sizes, dim)
        indices = all_gather_v((indices + offset).contiguous(), comm, sizes, dim)
        values, chosen = torch.topk(values, k, dim, **named)
        return values, indices.gather(dim, chosen)

    return in_every_form(call, run)


SORTING: Table = family(
    {
        "sort.default sort.stable sort.values sort.values_stable": Rule(sort, _sort),
        "median nanmedian mode kthvalue": Rule(median, _median),
        "topk": Rule(topk, _topk),
    }
)
