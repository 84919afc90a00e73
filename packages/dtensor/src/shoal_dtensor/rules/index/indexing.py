"""Sharding of `x[indices]` and `x[indices] = values` with index tensors, and of `take` and `put`.

Dims that are not indexed keep their sharding. Along an indexed dim every rank looks up the indices
that fall into its shard. A read sums the elements of all ranks, with zeros for elements of other
ranks. A write changes only the shard of the rank that has the element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout.spec import Spec
from ...layout.tensor_meta import TensorMeta
from ..language.local_ops import (
    all_reduce_traffic,
    all_reduced,
    bytes_of,
    check_indices,
    from_the_front,
    local_positions,
    moved_between_boxes,
    sharding_axes,
    where_sharded,
)
from ..language.notation import aligned
from ..language.rule import (
    Check,
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
    Rule,
    S,
    Table,
    adds_up,
    family,
)
from .data_dependent import assumed_result_bytes, selected_by
from .gather_scatter import lookup, lookup_partial


class IndexedDims(NamedTuple):
    """The correspondence between the dims of `x[indices]`, `x` and the indices.

    For x of shape (2, 3, 4, 5), `x[:, i, j]` with i and j of shape (6, 7) has the shape (2, 6, 7,
    5): `indexed` is ((1,), (2,)), `kept` is ((0, 0), (3, 3)), `first` is 1 and `ndim` is 2.
    """

    # for each index tensor, in order, the dims of x that it stands for (a mask stands for several)
    indexed: tuple[tuple[int, ...], ...]
    # pairs (dim of x, dim of the result) of the other dims
    kept: tuple[tuple[int, int], ...]
    # where the indices' common dims begin in the result
    first: int
    ndim: int  # how many common dims the indices have


def _is_mask(index: TensorMeta | Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def indexed_dims(source: TensorMeta, indices: Sequence[TensorMeta | None]) -> IndexedDims:
    """Return the dims of `source[indices]`; a mask counts as the index tensors that replace it."""
    indexed: list[tuple[int, ...]] = []
    dim = 0
    ndim = 0
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
    return IndexedDims(tuple(indexed), kept, first, ndim)


def index(call: OpCall) -> Iterator[Row]:
    source, *indices = call.tensors
    where = indexed_dims(source, call["indices"])
    if any(map(_is_mask, indices)):
        # The length of `x[mask]` is data-dependent: every rank gathers the elements of all.
        for d in where.indexed[0] if len(indices) == 1 and not where.first else ():
            yield call.row(self=S(d), indices=S(d), traffic=assumed_result_bytes(call))
        return
    yield from (call.row(self=S(d), out=S(o)) for d, o in where.kept)
    for j in range(where.ndim):
        if call.outputs[0].shape[where.first + j] != 1:
            yield call.row(
                indices=[aligned(index, j, where.ndim) for index in indices], out=S(where.first + j)
            )
    reduced = all_reduce_traffic(bytes_of(call.outputs[0]))
    summed = where.indexed if adds_up(source.dtype) else ()
    yield from (call.row(self=S(d), out=R, traffic=reduced) for dims in summed for d in dims)


def _index(local_call: LocalCall) -> LocalFunction | None:
    """Sum over shards the elements whose indices are all in the shard, with 0 for the others."""
    call = local_call.call
    spec = local_call["self"]
    where = indexed_dims(call["self"], call["indices"])
    if any(map(_is_mask, call.tensors[1:])):
        mask = local_call.inputs[1]
        axes = sharding_axes(mask) if len(local_call.inputs) == 2 else ()
        return (lambda x, indices: selected_by(indices[0], mask, axes, x)) if axes else None
    sharded = [d for (d,) in where.indexed if spec.dim_shardings[d].axes]
    if not sharded:
        return _checked(local_call, None)

    def local(indices: Sequence[Any]) -> tuple[list[Any], Tensor]:
        positions = list(indices)
        is_local = torch.ones((), dtype=torch.bool, device=indices[sharded[0]].device)
        for d in sharded:
            positions[d], is_in_dim = local_positions(indices[d], spec, d)
            is_local = is_local & is_in_dim
        return positions, is_local

    read = lookup(local_call, 0, local, local_call.outputs[0].ndim - where.first - where.ndim)
    # Left partial, it would read as another result by `to_local`.
    axes = sharding_axes(spec, sharded)
    reduction = lookup_partial(call["self"]).reduce_op
    return _checked(local_call, lambda x, *args: all_reduced(read(x, *args), spec, axes, reduction))


def _index_checks(call: OpCall) -> dict[str, list[Check]]:
    """Return checks that the elements of each index tensor are in the dim; a mask needs none."""
    tensors = [index for index in call["indices"] if index is not None]
    indexed = indexed_dims(call["self"], call["indices"]).indexed
    checks: list[Check] = []
    for index, dims in zip(tensors, indexed, strict=True):
        length = 0 if _is_mask(index) else call["self"].shape[dims[0]]
        in_dim: Check = partial(check_indices, length=length, from_end=True)
        checks.append(_pass if _is_mask(index) else in_dim)
    return {"indices": checks}


def _pass(index: Tensor) -> None:
    """Check nothing."""


def _checked(local_call: LocalCall, function: LocalFunction | None) -> LocalFunction | None:
    """Return the local function; on a rank with an empty shard, check the indices before it.

    Kernels do not compare indices with the size of the dim if the shard is empty.
    """
    if not any(0 in spec.local_shape and 0 not in spec.shape for spec in local_call.inputs):
        return function
    call = local_call.call
    read_or_write = call.op if function is None else function
    checks = _index_checks(call)["indices"]

    def run(x: Tensor, indices: Sequence[Any], *args: Any) -> Any:
        tensors = [index for index in indices if index is not None]
        for index, check in zip(tensors, checks, strict=True):
            check(index)
        return read_or_write(x, indices, *args)

    return run


def index_put(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `index_put`: shard `self`, and also the values along the dims they span."""
    source, *indices, values = call.tensors
    where = indexed_dims(source, call["indices"])
    ndim = source.ndim - sum(map(len, where.indexed)) + where.ndim
    yield from (
        call.row(self=S(d), values=aligned(values, o, ndim), out=S(d)) for d, o in where.kept
    )
    if _same_everywhere(call, where):
        yield from (
            call.row(self=S(d), indices=S(j), out=S(d)) for j, d in enumerate(where.indexed[0])
        )
    yield from (call.row(self=S(d), out=S(d)) for dims in where.indexed for d in dims)
    if call["accumulate"]:
        yield call.row(self=P("sum"), values=P("sum"), out=P("sum"))
        # Indices and values sharded alike: each rank adds its own, a partial sum.
        for j in range(
            where.ndim if values.ndim == ndim and not any(map(_is_mask, indices)) else 0
        ):
            of_indices = all(index.ndim == where.ndim and index.shape[j] != 1 for index in indices)
            if of_indices and values.shape[where.first + j] != 1:
                yield call.row(self=P("sum"), indices=S(j), values=S(where.first + j), out=P("sum"))


def _same_everywhere(call: OpCall, where: IndexedDims) -> bool:
    """Tell whether one mask selects the elements that are all set to the same value."""
    _, *indices, values = call.tensors
    if len(indices) != 1 or not _is_mask(indices[0]):
        return False
    behind = call.tensors[0].ndim - where.indexed[0][-1] - 1
    return values.ndim <= behind or values.shape[-1 - behind] == 1


def _put_one_value(local_call: LocalCall, dims: Sequence[int]) -> LocalFunction:
    """Write one value wherever the mask is true in this rank's shard."""
    op = local_call.call.op
    spec = local_call.inputs[0]
    mask = local_call.inputs[1]
    sharded = [(j, d) for j, d in enumerate(dims) if spec.dim_shardings[d].axes]
    place = next(i for i, index in enumerate(local_call.call["indices"]) if index is not None)

    def run(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *args: Any) -> Any:
        mask_here = indices[place]
        assert mask_here is not None, "the mask is where the call had it"
        # the mask covers the shard of x, except on a rank without elements of x
        for j, d in sharded:
            size = spec.local_shape[d]
            mask_here = mask_here.narrow(
                j, spec.local_offset[d] - mask.local_offset[j] if size else 0, size
            )
        return op(x, [*indices[:place], mask_here, *indices[place + 1 :]], values, *args)

    return run


def _index_put(local_call: LocalCall) -> LocalFunction | None:
    """Write only the positions that are in this rank's shard."""
    call = local_call.call
    spec = local_call.inputs[0]
    where = indexed_dims(call["self"], call["indices"])
    dims = [d for group in where.indexed for d in group]
    sharded = [n for n, d in enumerate(dims) if spec.dim_shardings[d].axes]
    if not sharded:
        return _checked(local_call, None)
    if _same_everywhere(call, where):
        return _put_one_value(local_call, dims)
    op = call.op
    first = where.first
    adds = bool(call["accumulate"])
    ndim = spec.ndim - len(dims) + where.ndim

    def run(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *args: Any) -> Any:
        # every mask replaced by where it is true, one tensor per dim
        integers = [
            part
            for index in indices
            if index is not None
            for part in (index.nonzero().unbind(1) if _is_mask(index) else (index,))
        ]
        positions = list(torch.ops.aten.broadcast_tensors.default(integers))
        shape = positions[0].shape
        is_local = torch.ones_like(positions[0], dtype=torch.bool)
        for n in sharded:
            positions[n], is_in_dim = local_positions(positions[n], spec, dims[n])
            is_local &= is_in_dim
        common = [*range(first, first + len(shape))]
        wide = [1] * (ndim - values.ndim) + list(values.shape)
        wide[first : first + len(shape)] = shape
        rows = values.expand(wide).movedim(common, [*range(len(shape))])
        rows = rows.reshape(shape.numel(), *rows.shape[len(shape) :])
        flat = [p.reshape(-1) for p in positions]
        positions, rows = _in_shard(
            x, dims, flat, rows, is_local=is_local.reshape(-1), first=first, adds=adds
        )
        return op(x, _target(x, dims, positions), rows.movedim(0, first) if first else rows, *args)

    return _checked(local_call, run)


def _target(x: Tensor, dims: Sequence[int], positions: Sequence[Tensor]) -> list[Tensor | None]:
    at = dict(zip(dims, positions, strict=True))
    return [at.get(d) for d in range(x.ndim)]


def _in_shard(  # noqa: PLR0913  # all that is written
    x: Tensor,
    dims: Sequence[int],
    positions: list[Tensor],
    rows: Tensor,
    is_local: Tensor,
    first: int,
    adds: bool,
) -> tuple[list[Tensor], Tensor]:
    """Return positions and rows that write only local elements.

    There are as many as before, because the host does not know the number of local elements.
    """
    if 0 in x.shape or not len(is_local):
        return [p[:0] for p in positions], rows[:0]
    column = is_local.view(-1, *[1] * (rows.ndim - 1))
    # the others add nothing, each somewhere else: a device adds equal positions one after another
    if adds:
        at = torch.arange(len(is_local), device=x.device)
        spread = [
            torch.where(is_local, p, at % x.shape[d]) for p, d in zip(positions, dims, strict=True)
        ]
        return spread, torch.where(column, rows, rows.new_full((), -0.0))  # -0.0 + -0.0 is -0.0
    # The others repeat the write of the last local one, or keep the old value if none is local.
    last = (is_local * torch.arange(1, len(is_local) + 1, device=x.device)).argmax(0, keepdim=True)
    there = [p.index_select(0, last) for p in positions]
    present = torch.ops.aten.index.Tensor(x, _target(x, dims, there)).movedim(first, 0)
    row = torch.where(is_local.any(), rows.index_select(0, last), present)
    return [
        torch.where(is_local, p, q) for p, q in zip(positions, there, strict=True)
    ], torch.where(column, rows, row)


def take(call: OpCall) -> Iterator[Row]:
    source = call["self"]
    index = call["index"]
    yield from (call.row(index=S(d), out=S(d)) for d in range(index.ndim))
    yield from (call.row(self=S(d), out=lookup_partial(source)) for d in range(source.ndim))


def _flat_positions(index: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Convert flat global indices to flat local ones; also return whether they are local."""
    here = [-start for start in spec.local_offset]
    return moved_between_boxes(
        from_the_front(index, spec.shape.numel()), spec.shape, spec.local_shape, here
    )


@where_sharded
def _take(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    return lookup(local_call, 0, partial(_flat_positions, spec=spec))


def put(call: OpCall) -> Iterator[Row]:
    yield from (call.row(self=S(d), out=S(d)) for d in range(call["self"].ndim))
    if call["accumulate"]:
        yield call.row(self=P("sum"), source=P("sum"), out=P("sum"))


def _put(local_call: LocalCall) -> LocalFunction | None:
    op = local_call.call.op
    spec = local_call["self"]
    if not sharding_axes(spec):
        return None

    def run(x: Tensor, index: Tensor, source: Tensor, *args: Any) -> Any:
        position, is_local = _flat_positions(index, spec)
        return op(x, position[is_local], source.reshape(index.shape)[is_local], *args)

    return run


INDEXING: Table = family(
    {
        "index.Tensor _unsafe_index.Tensor": Rule(
            index, _index, moves="self", checks=_index_checks
        ),
        "index_put.default index_put_.default": Rule(index_put, _index_put, checks=_index_checks),
        "_index_put_impl_.default _unsafe_index_put.default": Rule(
            index_put, _index_put, checks=_index_checks
        ),
        "take.default": Rule(take, _take, moves="self"),
        "put.default put_.default": Rule(put, _put),
    }
)
