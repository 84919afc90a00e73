"""Sharding of extremes with their places: argmax, argmin, max and min along a dim, aminmax.

Along a cut dim each piece offers its extreme and where it is; everyone gathers the offers and takes the first best.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_gather_v

from ..spec import Spec
from .local import cutting, filling_out, or_empty
from .rule import LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["EXTREME"]


def _rows(call: OpCall) -> list[Row]:
    (source,), count = call.tensors, len(call.outputs)
    kept = bool(call.get("keepdim", False))
    if call["dim"] is None:
        offer = source.dtype.itemsize + 8
        return [Row((S(d),), (R,) * count, traffic=offer, ordered=True) for d in range(source.ndim)]
    dim, rows = call.dim(), []
    for d in range(source.ndim):
        if d == dim:
            offers = prod(call.outputs[0].shape) * (source.dtype.itemsize + 8)
            rows.append(Row((S(d),), (R,) * count, traffic=offers, ordered=True))
        else:
            rows.append(Row((S(d),), (S(d if kept or d < dim else d - 1),) * count))
    return rows


def _best(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    values, indices = torch.max(x, dim) if largest else torch.min(x, dim)
    return values, indices


def _offers(spec: Spec, axes: tuple[int, ...], values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The offer of every non-empty piece along mesh axes, in a new leading dim; empty pieces offer none."""
    comm = spec.mesh.comm(axes)
    coordinate = list(spec.coordinate or (0,) * spec.mesh.ndim)
    sizes = []
    for index in range(comm.size):
        for axis in reversed(axes):
            index, coordinate[axis] = divmod(index, spec.mesh.shape[axis])
        sizes.append(int(0 not in spec.local_shape_at(coordinate)))
    return all_gather_v(values.contiguous(), comm, sizes), all_gather_v(indices.contiguous(), comm, sizes)


def _local(decided: LocalCall) -> LocalFunction | None:
    call, (spec,) = decided.call, decided.inputs
    if call["dim"] is None:
        return filling_out(call, _anywhere(decided)) if cutting(spec) else None
    if not spec.ndim or not (cut := spec.cut(dim := call.dim())).axes:
        return or_empty(decided)
    if any(not n for d, n in enumerate(spec.local_shape) if d != dim):
        return or_empty(decided)
    largest, kept, offset = "max" in call.op.__name__, bool(call["keepdim"]), spec.offset(dim)
    offered = (min(spec.local_shape[dim], 1), *(n for d, n in enumerate(spec.local_shape) if d != dim))
    both = len(call.outputs) == 2

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        values, indices = x.new_empty(offered), x.new_empty(offered, dtype=torch.int64)
        if x.shape[dim]:
            values[0], indices[0] = _best(x, dim, largest)
        values, indices = _offers(spec, cut.axes, values, indices + offset)
        values, chosen = _best(values, 0, largest)
        places = indices.gather(0, chosen.unsqueeze(0)).squeeze(0)
        results = tuple(t.unsqueeze(dim) if kept else t for t in (values, places))
        return results if both else results[1]

    return filling_out(call, run)


def _anywhere(decided: LocalCall) -> LocalFunction:
    """The place of the extreme of all elements, counted in the flattened global tensor; of equal ones the first."""
    call, (spec,) = decided.call, decided.inputs
    largest, shape, axes = "max" in call.op.__name__, decided.outputs[0].shape, cutting(spec)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        values, places = x.new_empty(0), x.new_empty(0, dtype=torch.int64)
        if x.numel():
            best, index = _best(x.reshape(-1), 0, largest)
            values, places = best.reshape(1), _global_place(index, spec).reshape(1)
        values, places = _offers(spec, axes, values, places)
        best, _ = _best(values, 0, largest)
        winners = (values == best) | (values != values)
        return places[winners].min().reshape(shape)

    return run


def _global_place(index: Tensor, spec: Spec) -> Tensor:
    """The flat global index of a flat local one."""
    place, step = torch.zeros_like(index), 1
    for size, held, offset in zip(*map(reversed, (spec.shape, spec.local_shape, spec.local_offset)), strict=True):
        place = place + (index % held + offset) * step
        index, step = index // held, step * size
    return place


# --- aminmax ----------------------------------------------------------------------------------------------------------


def _both_rows(call: OpCall) -> list[Row]:
    """The smallest and the largest value: each piece's own, still to be reduced."""
    ndim, dim = call.tensors[0].ndim, None if call["dim"] is None else call.dim()
    shift = 0 if call["keepdim"] else 1
    rows = []
    for d in range(ndim):
        kept = S(d if dim is None or d < dim else d - shift)
        reduced = dim is None or d == dim
        rows.append(Row((S(d),), (P("min"), P("max")) if reduced else (kept, kept)))
    return rows


def _both_local(decided: LocalCall) -> LocalFunction | None:
    """The operator itself, except on an empty piece: there the values that never win."""
    if 0 not in decided.inputs[0].local_shape:
        return None
    dtype, shapes = decided.outputs[0].dtype, [spec.local_shape for spec in decided.outputs]
    if dtype == torch.bool:
        ends: tuple[float, float] = (True, False)
    else:
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        ends = (torch.inf, -torch.inf) if dtype.is_floating_point else (info.max, info.min)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_full(shape, end) for shape, end in zip(shapes, ends, strict=True))

    return filling_out(decided.call, run)


EXTREME: Table = family(
    {
        "argmax argmin max.dim max.dim_max min.dim min.dim_min": Rule(_rows, _local, unordered=True),
        "aminmax": Rule(_both_rows, _both_local),
    }
)
