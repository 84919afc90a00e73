"""Sharding of extremes with their indices: argmax, argmin, max and min along a dim, aminmax.

Along a sharded dim each shard offers its extreme and its index; every rank gathers the offers and takes the first best.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_gather_v

from ...layout.spec import Spec
from ..language.index_bounds import moved_between_boxes
from ..language.local_ops import in_every_form, sharding_axes
from ..language.rule import LocalCall, LocalFunction, OpCall, P, Row, Rule, S, Table
from ..language.rule_tables import family


def argmax(call: OpCall) -> Iterator[Row]:
    source, keepdim = call["self"], bool(call["keepdim"])
    offer = source.dtype.itemsize + 8  # a value and its index
    if call["dim"] is None:
        yield from (call.row(self=S(d), traffic=lambda ranks: offer * ranks, ordered=True) for d in range(source.ndim))
        return
    dim, columns = call.dim(), prod(call.outputs[0].shape)
    for d in range(source.ndim):
        if d == dim:
            yield call.row(self=S(d), traffic=lambda ranks: columns * offer * ranks, ordered=True)
        else:
            yield call.row(self=S(d), out=S(d if keepdim or d < dim else d - 1))


def _best(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    values, indices = torch.max(x, dim) if largest else torch.min(x, dim)
    return values, indices


def _argmax(local_call: LocalCall) -> LocalFunction | None:
    """The first best of the shards' first best."""
    call, spec = local_call.call, local_call["self"]
    if call["dim"] is None:
        return in_every_form(call, _of_all_elements(local_call)) if sharding_axes(spec) else None
    if not spec.ndim or not (sharding := spec.dim_sharding(dim := call.dim())).axes:
        return None
    largest, keepdim, offset = "max" in call.op.__name__, bool(call["keepdim"]), spec.offset(dim)
    columns = [n for d, n in enumerate(spec.local_shape) if d != dim]
    offers = [min(n, 1) for n in sharding.sizes]  # an empty shard has none
    offered, with_values = (min(spec.local_shape[dim], 1), *columns), len(call.outputs) == 2

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        values, indices = x.new_empty(offered), x.new_empty(offered, dtype=torch.int64)
        if x.shape[dim]:
            values[0], indices[0] = _best(x, dim, largest)
        comm = spec.mesh.comm(sharding.axes)
        values, indices = all_gather_v(values, comm, offers), all_gather_v(indices + offset, comm, offers)
        values, chosen = _best(values, 0, largest)
        best = values, indices.gather(0, chosen.unsqueeze(0)).squeeze(0)
        results = tuple(t.unsqueeze(dim) if keepdim else t for t in best)
        return results if with_values else results[1]

    return in_every_form(call, run)


def _of_all_elements(local_call: LocalCall) -> LocalFunction:
    """The index of the extreme of all elements, counted in the flattened global tensor; of equal ones the first."""
    call, spec = local_call.call, local_call["self"]
    largest, shape, axes = "max" in call.op.__name__, local_call.outputs[0].shape, sharding_axes(spec)
    offers = _shards_with_elements(spec, axes)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        values, indices = x.new_empty(0), x.new_empty(0, dtype=torch.int64)
        if x.numel():
            best, index = _best(x.reshape(-1), 0, largest)
            index, _ = moved_between_boxes(index, spec.local_shape, spec.shape, spec.local_offset)
            values, indices = best.reshape(1), index.reshape(1)
        comm = spec.mesh.comm(axes)
        values, indices = all_gather_v(values, comm, offers), all_gather_v(indices, comm, offers)
        best, _ = _best(values, 0, largest)
        winners = (values == best) | (values != values)
        return indices[winners].min().reshape(shape)

    return run


def _shards_with_elements(spec: Spec, axes: tuple[int, ...]) -> list[int]:
    """For every coordinate along mesh axes, the last varying fastest: 1 if its shard has elements, 0 if not."""
    coordinate = [*(spec.coordinate or (0,) * spec.mesh.ndim)]
    result = []
    for place in product(*(range(spec.mesh.shape[axis]) for axis in axes)):
        for axis, index in zip(axes, place, strict=True):
            coordinate[axis] = index
        result.append(int(0 not in spec.local_shape_at(coordinate)))
    return result


# --- aminmax ----------------------------------------------------------------------------------------------------------


def aminmax(call: OpCall) -> Iterator[Row]:
    """The smallest value is the smallest over shards of each shard's own; likewise the largest."""
    ndim, dim = call["self"].ndim, None if call["dim"] is None else call.dim()
    for d in range(ndim):
        if dim is None or d == dim:
            yield call.row(self=S(d), min=P("min"), max=P("max"))
        else:
            yield call.row(self=S(d), out=S(d if d < dim or call["keepdim"] else d - 1))


ARGMAX: Table = family(
    {
        "argmax argmin max.dim max.dim_max min.dim min.dim_min": Rule(argmax, _argmax, unordered=True, skip_empty=True),
        "aminmax": Rule(aminmax, skip_empty=True),
    }
)
