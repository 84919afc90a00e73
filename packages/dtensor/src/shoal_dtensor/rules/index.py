"""Sharding of `x[indices]` and `x[indices] = values` with index tensors, and of `take` and `put`.

Dims that are not indexed stay as they are cut.  Along an indexed dim every rank looks up the indices that fall into
its piece: reading leaves a partial sum with zeros elsewhere, writing reaches the one rank that has the element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spec import Spec, TensorMeta
from .bounds import checked, inside
from .found import few, ordered, with_offset
from .local import cutting
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family
from .view import any_partial

__all__ = ["INDEX"]

aten = torch.ops.aten


class Layout(NamedTuple):
    """How the dims of `x[indices]` come about.

    Attributes:
        indexed: for each index tensor, in order, the dims of x that it stands for (a mask stands for several).
        kept: pairs (dim of x, dim of the result) of the other dims.
        first: where the indices' common dims begin in the result.
        ndim: how many common dims the indices have.
    """

    indexed: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, int], ...]
    first: int
    ndim: int


def _is_mask(index: TensorMeta | Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def layout(source: TensorMeta, indices: Sequence[TensorMeta | None]) -> Layout:
    """The dims of `source[indices]`; masks count as the one-dimensional index tensors that they become."""
    indexed: list[tuple[int, ...]] = []
    dim = ndim = 0
    for index in indices:
        span = 1 if index is None or not _is_mask(index) else index.ndim
        if index is not None:
            indexed.append(tuple(range(dim, dim + span)))
            ndim = max(ndim, 1 if _is_mask(index) else index.ndim)
        dim += span
    taken = [d for dims in indexed for d in dims]
    together = all(b == a + 1 for a, b in pairwise(taken))
    first = taken[0] if together and taken else 0
    others = [d for d in range(source.ndim) if d not in taken]
    kept = tuple((d, i if i < first else i + ndim) for i, d in enumerate(others))
    return Layout(tuple(indexed), kept, first, ndim)


def _aligned(meta: TensorMeta, dim: int, ndim: int) -> Entry:
    """How a tensor lies that is broadcast to `ndim` dims of which `dim` is cut."""
    own = dim - (ndim - meta.ndim)
    return S(own) if own >= 0 and meta.shape[own] != 1 else R


# --- reading ----------------------------------------------------------------------------------------------------------


def _gather_op(source: TensorMeta) -> str:
    return "max" if source.dtype == torch.bool else "sum"


def index_rows(call: OpCall) -> list[Row]:
    source, *indices = call.tensors
    count = len(indices)
    where = layout(source, call["indices"])
    if any(map(_is_mask, indices)):
        return _masked_rows(call, where) if count == 1 else []
    rows = [Row((S(d), *[R] * count), (S(o),)) for d, o in where.kept]
    rows += [
        Row((R, *(_aligned(index, j, where.ndim) for index in indices)), (S(where.first + j),))
        for j in range(where.ndim)
        if call.outputs[0].shape[where.first + j] != 1
    ]
    made = P(_gather_op(source))
    rows += [Row((S(d), *[R] * count), (made,)) for dims in where.indexed for d in dims]
    return rows + [Row((row.inputs[0], *[R] * count), row.outputs) for row in any_partial(1, 1)]


def _masked_rows(call: OpCall, where: Layout) -> list[Row]:
    """`x[mask]` is as long as the data say: each rank finds its elements, everyone gathers all."""
    if where.first:
        return []
    return [Row((S(d), S(d)), (R,), traffic=few(call)) for d in where.indexed[0]]


def _read_masked(decided: LocalCall) -> LocalFunction | None:
    mask = decided.inputs[1]
    axes = cutting(mask)
    if not axes:
        return None

    def run(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        index = indices[0]
        assert index is not None, "the mask is the first index"
        return ordered(mask, axes, with_offset(mask, index.nonzero()), x[index])[1]

    return run


def index_local(decided: LocalCall) -> LocalFunction | None:
    """Indices outside the piece read its first element instead, which is then zeroed."""
    call, spec = decided.call, decided.inputs[0]
    where = layout(call.tensors[0], call["indices"])
    if any(map(_is_mask, call.tensors[1:])):
        return _read_masked(decided) if len(decided.inputs) == 2 else None
    cut = {n: dims[0] for n, dims in enumerate(where.indexed) if spec.cuts[dims[0]].axes}
    if not cut:
        return None
    op, shape, first, ndim = call.op, decided.outputs[0].local_shape, where.first, where.ndim
    tail = len(shape) - first - ndim

    def run(x: Tensor, indices: Sequence[Tensor | None], *args: Any) -> Any:
        mine: Tensor | None = None
        local, n = list(indices), -1
        for i, index in enumerate(indices):
            n += index is not None
            if index is not None and n in cut:
                local[i], hit = inside(index, spec, cut[n])
                mine = hit if mine is None else mine & hit
        assert mine is not None, "some indexed dim is cut"
        if 0 in x.shape:
            return x.new_zeros(shape)
        return op(x, local, *args).masked_fill_(~mine.view(*mine.shape, *[1] * tail), 0)

    return run


# --- writing ----------------------------------------------------------------------------------------------------------


def _writing_rows(call: OpCall) -> list[Row]:
    """Written is `self`: rows cut it, and give values the same cut where they are as wide."""
    source, *indices, values = call.tensors
    count, where = len(indices), layout(call.tensors[0], call["indices"])
    masked = any(map(_is_mask, indices))
    ndim = source.ndim - sum(map(len, where.indexed)) + where.ndim
    rows = [Row((S(d), *[R] * count, _aligned(values, o, ndim)), (S(d),)) for d, o in where.kept]
    if _same_everywhere(call, where):
        rows += [Row((S(d), S(j), R), (S(d),)) for j, d in enumerate(where.indexed[0])]
    rows += [Row((S(d), *[R] * count, R), (S(d),)) for dims in where.indexed for d in dims]
    if call["accumulate"]:
        rows.append(Row((P("sum"), *[R] * count, P("sum")), (P("sum"),)))
        if not masked:
            rows += [
                Row(
                    (P("sum"), *(_aligned(i, j, where.ndim) for i in indices), _aligned(values, where.first + j, ndim)),
                    (P("sum"),),
                )
                for j in range(where.ndim)
                if all(i.ndim == where.ndim and i.shape[j] != 1 for i in indices)
                and values.ndim == ndim
                and values.shape[where.first + j] != 1
            ]
    return rows


def _same_everywhere(call: OpCall, where: Layout) -> bool:
    """Whether a single mask says where one value goes that does not depend on the place."""
    _, *indices, values = call.tensors
    if len(indices) != 1 or not _is_mask(indices[0]):
        return False
    behind = call.tensors[0].ndim - where.indexed[0][-1] - 1
    return values.ndim <= behind or values.shape[-1 - behind] == 1


def _masked_local(decided: LocalCall, dims: Sequence[int]) -> LocalFunction:
    """One value wherever a mask is true: each rank takes the part of the mask that lies over its piece."""
    op, spec, mask = decided.call.op, decided.inputs[0], decided.inputs[1]
    cut = [(j, d) for j, d in enumerate(dims) if spec.cuts[d].axes]
    place = next(i for i, index in enumerate(decided.call["indices"]) if index is not None)

    def run(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *args: Any) -> Any:
        part = indices[place]
        assert part is not None, "the mask is where the call had it"
        for j, d in cut:  # the mask has at least what x has, but for a rank without elements of x
            size = spec.local_shape[d]
            part = part.narrow(j, spec.local_offset[d] - mask.local_offset[j] if size else 0, size)
        return op(x, [*indices[:place], part, *indices[place + 1 :]], values, *args)

    return run


def _writing_local(decided: LocalCall) -> LocalFunction | None:
    """Of all places to write to, those in this rank's piece."""
    call, spec = decided.call, decided.inputs[0]
    where = layout(call.tensors[0], call["indices"])
    dims = [d for group in where.indexed for d in group]
    cut = [n for n, d in enumerate(dims) if spec.cuts[d].axes]
    if not cut:
        return None
    if _same_everywhere(call, where):
        return _masked_local(decided, dims)
    op, first = call.op, where.first
    ndim = spec.ndim - len(dims) + where.ndim

    def run(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *args: Any) -> Any:
        places = aten.broadcast_tensors.default(_as_integers(indices))
        mine = torch.ones_like(places[0], dtype=torch.bool)
        local = list(places)
        for n in cut:
            local[n], hit = inside(places[n], spec, dims[n])
            mine &= hit
        spread = (*range(first), *range(first + places[0].ndim, ndim))
        wide = values.expand(*_value_shape(values, ndim, first, places[0].shape))
        chosen = wide.permute(*range(first, first + places[0].ndim), *spread)[mine]
        back = chosen.movedim(0, first) if first else chosen
        target: list[Tensor | None] = [None] * x.ndim
        for n, d in enumerate(dims):
            target[d] = local[n][mine]
        return op(x, target, back, *args)

    return run


def _as_integers(indices: Sequence[Tensor | None]) -> list[Tensor]:
    """Index tensors with every mask replaced by where it is true, one tensor per dim."""
    found: list[Tensor] = []
    for index in indices:
        if index is not None:
            found += index.nonzero().unbind(1) if _is_mask(index) else [index]
    return found


def _value_shape(values: Tensor, ndim: int, first: int, places: torch.Size) -> list[int]:
    """`values`' shape with all dims, its indexed ones as wide as the places."""
    shape = [1] * (ndim - values.ndim) + list(values.shape)
    return [places[d - first] if first <= d < first + len(places) else n for d, n in enumerate(shape)]


# --- flat indices -----------------------------------------------------------------------------------------------------


def _take_rows(call: OpCall) -> list[Row]:
    source, index = call.tensors
    rows = [Row((R, S(d)), (S(d),)) for d in range(index.ndim)]
    rows += [Row((S(d), R), (P(_gather_op(source)),)) for d in range(source.ndim)]
    return rows + [Row((row.inputs[0], R), row.outputs) for row in any_partial(1, 1)]


def _local_place(spec: Spec) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """From flat global indices to flat local ones and whether they are local."""

    def run(index: Tensor) -> tuple[Tensor, Tensor]:
        rest = checked(index, spec.shape.numel())
        place, mine, step = torch.zeros_like(rest), torch.ones_like(rest, dtype=torch.bool), 1
        for size, held, offset in zip(*map(reversed, (spec.shape, spec.local_shape, spec.local_offset)), strict=True):
            at = rest % size - offset
            mine &= (at >= 0) & (at < held)
            place, rest, step = place + at * step, rest // size, step * held
        return place.masked_fill_(~mine, 0), mine

    return run


def _take_local(decided: LocalCall) -> LocalFunction | None:
    spec = decided.inputs[0]
    if all(not cut.axes for cut in spec.cuts):
        return None
    locate = _local_place(spec)

    def run(x: Tensor, index: Tensor, *args: Any) -> Any:
        if not x.numel():
            return x.new_zeros(index.shape)
        place, mine = locate(index)
        return aten.take.default(x, place).masked_fill_(~mine, 0)

    return run


def _put_rows(call: OpCall) -> list[Row]:
    source = call.tensors[0]
    rows = [Row((S(d), R, R), (S(d),)) for d in range(source.ndim)]
    return rows + ([Row((P("sum"), R, P("sum")), (P("sum"),))] if call["accumulate"] else [])


def _put_local(decided: LocalCall) -> LocalFunction | None:
    op, spec = decided.call.op, decided.inputs[0]
    if all(not cut.axes for cut in spec.cuts):
        return None
    locate = _local_place(spec)

    def run(x: Tensor, index: Tensor, values: Tensor, *args: Any) -> Any:
        place, mine = locate(index)
        return op(x, place[mine], values.reshape(index.shape)[mine], *args)

    return run


READ, WRITE = Rule(index_rows, index_local), Rule(_writing_rows, _writing_local)

INDEX: Table = {
    aten.index.Tensor: READ,
    aten._unsafe_index.Tensor: READ,
    aten.index_put.default: WRITE,
    aten.index_put_.default: WRITE,
    aten._index_put_impl_.default: WRITE,
    aten._unsafe_index_put.default: WRITE,
} | family({"take.default": Rule(_take_rows, _take_local), "put.default put_.default": Rule(_put_rows, _put_local)})
