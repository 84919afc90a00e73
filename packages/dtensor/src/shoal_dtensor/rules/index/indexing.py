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
    on_functional_form,
    sharding_axes,
    where_sharded,
)
from ..language.notation import broadcast_entry
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
    is_empty_shard,
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
    # how many common dims the indices have
    ndim: int

    @property
    def all_indexed(self) -> list[int]:
        """The dims of x that the index tensors stand for, in order."""
        return [d for dims in self.indexed for d in dims]


def _is_mask(index: TensorMeta | Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def indexed_dims(source: TensorMeta, indices: Sequence[TensorMeta | None]) -> IndexedDims:
    """Return the dims of `source[indices]`; a mask counts as the index tensors that replace it."""
    indexed: list[tuple[int, ...]] = []
    dim = 0
    ndim = 0
    for index in indices:
        if index is None:
            dim += 1
            continue
        is_mask = _is_mask(index)
        span = index.ndim if is_mask else 1
        indexed.append(tuple(range(dim, dim + span)))
        ndim = max(ndim, 1 if is_mask else index.ndim)
        dim += span
    taken = [d for dims in indexed for d in dims]
    are_together = all(second == first + 1 for first, second in pairwise(taken))
    first = taken[0] if are_together and taken else 0
    others = [d for d in range(source.ndim) if d not in taken]
    kept = []
    for i, d in enumerate(others):
        result_dim = i if i < first else i + ndim
        kept.append((d, result_dim))
    return IndexedDims(tuple(indexed), tuple(kept), first, ndim)


def index(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `x[indices]`."""
    source, *indices = call.tensors
    dims = indexed_dims(source, call["indices"])
    if any(map(_is_mask, indices)):
        if len(indices) == 1 and not dims.first and not call.schema.outs:
            # The length of `x[mask]` depends on data, so every rank gathers all elements.
            traffic = assumed_result_bytes(call)
            for d in dims.indexed[0]:
                yield call.row(self=S(d), indices=S(d), traffic=traffic)
        return
    for d, o in dims.kept:
        yield call.row(self=S(d), out=S(o))
    for j in range(dims.ndim):
        o = dims.first + j
        if call.outputs[0].shape[o] != 1:
            entries = [broadcast_entry(index, j, dims.ndim) for index in indices]
            yield call.row(indices=entries, out=S(o))
    if adds_up(source.dtype):
        reduced = all_reduce_traffic(bytes_of(call.outputs[0]))
        for d in dims.all_indexed:
            yield call.row(self=S(d), out=R, traffic=reduced)


@on_functional_form
def _index(local_call: LocalCall) -> LocalFunction | None:
    """Look up elements in each shard, with 0 for elements of other shards, and sum over shards."""
    call = local_call.call
    spec = local_call["self"]
    dims = indexed_dims(call["self"], call["indices"])
    if any(map(_is_mask, call.tensors[1:])):
        return _index_by_mask(local_call)
    sharded = [d for d in dims.all_indexed if spec.dim_shardings[d].axes]
    if not sharded:
        return _with_index_check(local_call, None)

    def to_local(indices: Sequence[Any]) -> tuple[list[Any], Tensor]:
        positions = list(indices)
        device = indices[sharded[0]].device
        is_local = torch.ones((), dtype=torch.bool, device=device)
        for d in sharded:
            positions[d], is_in_dim = local_positions(indices[d], spec, d)
            is_local = is_local & is_in_dim
        return positions, is_local

    dims_behind = local_call.outputs[0].ndim - dims.first - dims.ndim
    read = lookup(local_call, 0, to_local, dims_behind)
    # The result is not left partial, because `to_local` would show a rank's part as the result.
    axes = sharding_axes(spec, sharded)
    reduction = lookup_partial(call["self"]).reduce_op

    def reduce_found(x: Tensor, *args: Any) -> Tensor:
        return all_reduced(read(x, *args), spec, axes, reduction)

    return _with_index_check(local_call, reduce_found)


def _index_by_mask(local_call: LocalCall) -> LocalFunction | None:
    """Select elements of all shards if one mask is sharded like the tensor, else run the kernel."""
    if len(local_call.inputs) != 2:
        return None
    mask = local_call.inputs[1]
    axes = sharding_axes(mask)
    if not axes:
        return None
    return lambda x, indices: selected_by(indices[0], mask, axes, x)


def _index_checks(call: OpCall) -> dict[str, list[Check]]:
    """Return checks that the indices of each index tensor are in range; a mask needs no check."""
    tensors = [index for index in call["indices"] if index is not None]
    indexed = indexed_dims(call["self"], call["indices"]).indexed
    checks: list[Check] = []
    for index, dims in zip(tensors, indexed, strict=True):
        if _is_mask(index):
            checks.append(_pass)
            continue
        length = call["self"].shape[dims[0]]
        checks.append(partial(check_indices, length=length, from_end=True))
    return {"indices": checks}


def _pass(index: Tensor) -> None:
    """Check nothing."""


def _with_index_check(
    local_call: LocalCall, function: LocalFunction | None
) -> LocalFunction | None:
    """Return the local function, which on a rank with an empty shard first checks the indices.

    Kernels do not compare indices with the size of the dim if the shard is empty.
    """
    if not any(is_empty_shard(spec) for spec in local_call.inputs):
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
    dims = indexed_dims(source, call["indices"])
    ndim = source.ndim - len(dims.all_indexed) + dims.ndim
    for d, o in dims.kept:
        value_entry = broadcast_entry(values, o, ndim)
        yield call.row(self=S(d), values=value_entry, out=S(d))
    if _same_everywhere(call, dims):
        for j, d in enumerate(dims.indexed[0]):
            yield call.row(self=S(d), indices=S(j), out=S(d))
    for d in dims.all_indexed:
        yield call.row(self=S(d), out=S(d))
    if not call["accumulate"]:
        return
    partial_sum = P("sum")
    yield call.row(self=partial_sum, values=partial_sum, out=partial_sum)
    has_all_values = values.ndim == ndim and not any(map(_is_mask, indices))
    if not has_all_values:
        return
    # If indices and values are sharded alike, each rank adds its own values to a partial sum.
    for j in range(dims.ndim):
        value_dim = dims.first + j
        have_dim = all(_has_dim(index, j, dims.ndim) for index in indices)
        if have_dim and values.shape[value_dim] != 1:
            yield call.row(self=partial_sum, indices=S(j), values=S(value_dim), out=partial_sum)


def _has_dim(index: TensorMeta, dim: int, ndim: int) -> bool:
    """Tell whether an index has all common dims, and this one not broadcast."""
    return index.ndim == ndim and index.shape[dim] != 1


def _same_everywhere(call: OpCall, dims: IndexedDims) -> bool:
    """Tell whether one mask selects the elements that are all set to the same value."""
    source, *indices, values = call.tensors
    if len(indices) != 1 or not _is_mask(indices[0]):
        return False
    (masked,) = dims.indexed
    dims_behind = source.ndim - masked[-1] - 1
    if values.ndim <= dims_behind:
        return True
    return values.shape[-1 - dims_behind] == 1


def _put_one_value(local_call: LocalCall, dims: Sequence[int]) -> LocalFunction:
    """Write one value wherever the mask is true in this rank's shard."""
    op = local_call.call.op
    spec = local_call.inputs[0]
    mask = local_call.inputs[1]
    sharded = [(j, d) for j, d in enumerate(dims) if spec.dim_shardings[d].axes]
    indices_of_call = local_call.call["indices"]
    place = next(i for i, index in enumerate(indices_of_call) if index is not None)

    def run(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *args: Any) -> Any:
        local_mask = indices[place]
        assert local_mask is not None, "the mask must be at its place in the call"
        # This rank's part of the mask contains its shard of x, except if x has no elements here.
        for j, d in sharded:
            size = spec.local_shape[d]
            start = spec.local_offset[d] - mask.local_offset[j] if size else 0
            local_mask = local_mask.narrow(j, start, size)
        local_indices = [*indices]
        local_indices[place] = local_mask
        return op(x, local_indices, values, *args)

    return run


@on_functional_form
def _index_put(local_call: LocalCall) -> LocalFunction | None:
    """Write only the positions that are in this rank's shard."""
    call = local_call.call
    spec = local_call.inputs[0]
    indexed = indexed_dims(call["self"], call["indices"])
    dims = indexed.all_indexed
    sharded = [n for n, d in enumerate(dims) if spec.dim_shardings[d].axes]
    if not sharded:
        return _with_index_check(local_call, None)
    if _same_everywhere(call, indexed):
        return _put_one_value(local_call, dims)
    op = call.op
    first = indexed.first
    adds = bool(call["accumulate"])
    ndim = spec.ndim - len(dims) + indexed.ndim

    def run(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *args: Any) -> Any:
        positions = list(torch.ops.aten.broadcast_tensors.default(_as_integers(indices)))
        shape = positions[0].shape
        is_local = torch.ones_like(positions[0], dtype=torch.bool)
        for n in sharded:
            positions[n], is_in_dim = local_positions(positions[n], spec, dims[n])
            is_local &= is_in_dim
        # Flatten the common dims: one row of values for each position.
        common = [*range(first, first + len(shape))]
        wide = [1] * (ndim - values.ndim) + list(values.shape)
        wide[first : first + len(shape)] = shape
        common_first = [*range(len(shape))]
        rows = values.expand(wide).movedim(common, common_first)
        value_shape = rows.shape[len(shape) :]
        rows = rows.reshape(shape.numel(), *value_shape)
        flat = [position.reshape(-1) for position in positions]
        writes = _Writes(dims, flat, rows, is_local.reshape(-1), first=first)
        local_writes = writes.added_in(x) if adds else writes.put_in(x)
        local_rows = local_writes.rows
        if first:
            local_rows = local_rows.movedim(0, first)
        return op(x, _target(x, dims, local_writes.positions), local_rows, *args)

    return _with_index_check(local_call, run)


def _as_integers(indices: Sequence[Tensor | None]) -> list[Tensor]:
    """Return index tensors without None, each mask replaced by where it is true, one per dim."""
    integers: list[Tensor] = []
    for index in indices:
        if index is None:
            continue
        if _is_mask(index):
            integers += index.nonzero().unbind(1)
        else:
            integers.append(index)
    return integers


def _target(x: Tensor, dims: Sequence[int], positions: Sequence[Tensor]) -> list[Tensor | None]:
    at = dict(zip(dims, positions, strict=True))
    return [at.get(d) for d in range(x.ndim)]


class _Writes(NamedTuple):
    """Rows of values to be written into a shard.

    Attributes:
        dims: the dims of the shard that the positions are along.
        positions: for each of `dims` the position of each row.
        rows: the values, along dim 0 one for each position.
        is_local: whether each row belongs into the shard.
        first: where the positions' common dim begins in the indexed tensor.
    """

    dims: Sequence[int]
    positions: list[Tensor]
    rows: Tensor
    is_local: Tensor
    first: int

    # The results have as many rows as before, because the host does not know the number of local
    # rows.

    def added_in(self, x: Tensor) -> _Writes:
        """Return writes that add the local rows to a shard, and nothing in place of the others."""
        if self._is_nothing(x):
            return self._without_writes()
        # The other rows get different positions, because a device adds to equal positions one after
        # another.
        count = torch.arange(len(self.is_local), device=x.device)
        positions = []
        for position, dim in zip(self.positions, self.dims, strict=True):
            elsewhere = count % x.shape[dim]
            positions.append(torch.where(self.is_local, position, elsewhere))
        # Adding -0.0 does not change any value, whereas adding 0.0 would change -0.0.
        zero = self.rows.new_full((), -0.0)
        rows = torch.where(self._column(), self.rows, zero)
        return self._replace(positions=positions, rows=rows)

    def put_in(self, x: Tensor) -> _Writes:
        """Return writes of the local rows only.

        The others repeat the write of the last local one, or keep the old value if none is local.
        """
        if self._is_nothing(x):
            return self._without_writes()
        is_local = self.is_local
        numbers = torch.arange(1, len(is_local) + 1, device=x.device)
        last = (is_local * numbers).argmax(0, keepdim=True)
        last_positions = [position.index_select(0, last) for position in self.positions]
        target = _target(x, self.dims, last_positions)
        present = torch.ops.aten.index.Tensor(x, target).movedim(self.first, 0)
        row = torch.where(is_local.any(), self.rows.index_select(0, last), present)
        positions = []
        for position, last_position in zip(self.positions, last_positions, strict=True):
            positions.append(torch.where(is_local, position, last_position))
        rows = torch.where(self._column(), self.rows, row)
        return self._replace(positions=positions, rows=rows)

    def _is_nothing(self, x: Tensor) -> bool:
        return 0 in x.shape or not len(self.is_local)

    def _without_writes(self) -> _Writes:
        empty = [position[:0] for position in self.positions]
        return self._replace(positions=empty, rows=self.rows[:0])

    def _column(self) -> Tensor:
        """Return `is_local` in a shape that broadcasts to the rows."""
        ones = [1] * (self.rows.ndim - 1)
        return self.is_local.view(-1, *ones)


def take(call: OpCall) -> Iterator[Row]:
    """Yield rows that shard the index, or the source, in which ranks look up their own elements."""
    source = call["self"]
    index = call["index"]
    for d in range(index.ndim):
        yield call.row(index=S(d), out=S(d))
    for d in range(source.ndim):
        yield call.row(self=S(d), out=lookup_partial(source))


def _flat_positions(index: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Convert flat global indices to flat local ones; also return whether they are local."""
    shift = [-start for start in spec.local_offset]
    position = from_the_front(index, spec.shape.numel())
    return moved_between_boxes(position, spec.shape, spec.local_shape, shift)


@where_sharded
def _take(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    return lookup(local_call, 0, partial(_flat_positions, spec=spec))


def put(call: OpCall) -> Iterator[Row]:
    for d in range(call["self"].ndim):
        yield call.row(self=S(d), out=S(d))
    if call["accumulate"]:
        yield call.row(self=P("sum"), source=P("sum"), out=P("sum"))


def _put(local_call: LocalCall) -> LocalFunction | None:
    """Return a function that writes only to positions in this rank's shard."""
    op = local_call.call.op
    spec = local_call["self"]
    if not sharding_axes(spec):
        return None

    def run(x: Tensor, index: Tensor, source: Tensor, *args: Any) -> Any:
        position, is_local = _flat_positions(index, spec)
        local_source = source.reshape(index.shape)[is_local]
        return op(x, position[is_local], local_source, *args)

    return run


INDEXING: Table = family(
    {
        "index.Tensor index.Tensor_out _unsafe_index.Tensor": Rule(
            index, _index, moves="self", checks=_index_checks
        ),
        "index_put.default index_put.out index_put_.default": Rule(
            index_put, _index_put, checks=_index_checks
        ),
        "_index_put_impl.default _index_put_impl.out _index_put_impl_.default": Rule(
            index_put, _index_put, checks=_index_checks
        ),
        "_unsafe_index_put.default": Rule(index_put, _index_put, checks=_index_checks),
        "take.default": Rule(take, _take, moves="self"),
        "put.default put_.default": Rule(put, _put),
    }
)
