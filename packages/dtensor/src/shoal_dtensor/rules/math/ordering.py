"""Sharding of operators that compare along a dim: sort, median, topk, argmax, cumulative ones.

Along a sharded dim, shards are exchanged for complete columns, and the results are exchanged back.
If only a few values of a shard matter, every rank gathers only these: the candidates of `topk` and
`argmax`, or, for a cumulative operator, the total of each shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_gather, all_gather_v, all_to_all_blocks
from shoal_mesh.internal import with_dependence

from ...layout.dim_sharding import chunk_sizes
from ...layout.spec import Spec
from ...redistribute.execution.reduced_values import identity_of
from ..language.local_ops import (
    along_dim,
    bytes_of,
    functional,
    keepdim_shape,
    moved_between_boxes,
    shard_index,
    where_sharded,
)
from ..language.rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table, family
from .reduction import comparing, reduced_dims, rows_along


def sort(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `sort`, and of `median` and its like, whose results every rank has."""
    yield from rows_along(call, None)
    if "dim" not in call.arguments:
        return
    is_sort = "sort" in call.op.__name__
    # bytes of the inputs, which are exchanged for columns, and of the results, which are sent back
    nbytes = bytes_of(*call.tensors, *call.outputs)

    def traffic(ranks: int) -> float:
        return nbytes / ranks

    for d in call.dims():
        result = S(d) if is_sort else R
        yield call.row(self=S(d), out=result, traffic=traffic, ordered=is_sort)


@along_dim
def _sort(local_call: LocalCall, spec: Spec, dim: int) -> LocalFunction:
    """Sort complete columns on each rank, between two exchanges of shards.

    After the second exchange a rank has its shard of the result or, for `median` and its like, all
    of it.

    A (6, 4) tensor sharded by rows on 2 ranks, before and after the first of two all-to-alls:

        rank 0: rows 0..2 of columns a b c d        rank 0: rows 0..5 of columns a b
        rank 1: rows 3..5 of columns a b c d        rank 1: rows 0..5 of columns c d

    A rank sends half of its 12 elements, not all of them.
    """
    call = local_call.call
    sharding = spec.dim_sharding(dim)
    position = shard_index(spec, dim)
    name, _, _ = call.op.__name__.partition(".")
    name = name.removesuffix("_")
    keepdim = bool(call.get("keepdim"))
    options: dict[str, Any] = {}
    for option in ("descending", "k"):
        if option in call.arguments:
            options[option] = call[option]
    if name == "sort":
        options["stable"] = True
    sizes = sharding.sizes
    other_sizes = [n for d, n in enumerate(spec.local_shape) if d != dim]
    rows = prod(other_sizes)
    columns = chunk_sizes(rows, len(sizes))

    def exchange(blocks: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        comm = spec.mesh.comm(sharding.axes)
        all_to_all_blocks([[block] for block in blocks], comm, [[part] for part in out])

    def share(result: Tensor) -> Tensor:
        """Return this rank's shard of a result, or all of it, given the result of its columns."""
        if name != "sort":
            comm = spec.mesh.comm(sharding.axes)
            values = all_gather_v(result.contiguous(), comm, columns).view(other_sizes)
            return values.unsqueeze(dim) if keepdim else values
        shard = result.new_empty(rows, sizes[position])
        exchange(result.split_with_sizes(sizes, 1), shard.split_with_sizes(columns))
        return shard.view(*other_sizes, sizes[position]).movedim(-1, dim).contiguous()

    def run(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        whole = x.new_empty(columns[position], sum(sizes))
        shard = x.movedim(dim, -1).reshape(rows, sizes[position])
        exchange(shard.split_with_sizes(columns), whole.split_with_sizes(sizes, 1))
        results = getattr(torch, name)(whole, dim=-1, **options)
        return tuple(map(share, results))

    return run


def topk(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `topk`, `argmax` and their like: every rank gathers candidates.

    A candidate is a value and its index. Kernels refuse to choose among no elements, except in an
    empty shard, so there are no rows then, and all ranks raise the error.
    """
    if not prod(call["self"].shape[dim] for dim in reduced_dims(call)):
        return
    candidate_bytes = call["self"].dtype.itemsize + 8
    candidates = prod(call.outputs[0].shape) * candidate_bytes
    yield from rows_along(call, R, lambda ranks: candidates * (ranks - 1), ordered=True)


@along_dim
def _topk(local_call: LocalCall, spec: Spec, dim: int) -> LocalFunction:
    """Select the k best of the k best values of each shard."""
    k = local_call.call["k"]
    options = {name: local_call.call[name] for name in ("largest", "sorted")}
    axes = spec.dim_sharding(dim).axes
    offers = [min(k, n) for n in spec.sizes(dim)]

    def run(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        most = min(k, x.shape[dim])
        values, places = torch.topk(x, most, dim, **options)
        indices = places + spec.offset(dim)
        comm = spec.mesh.comm(axes)
        values = all_gather_v(values.contiguous(), comm, offers, dim)
        indices = all_gather_v(indices.contiguous(), comm, offers, dim)
        values, chosen = torch.topk(values, k, dim, **options)
        return values, indices.gather(dim, chosen)

    return run


@partial(
    where_sharded,
    dims=lambda call: range(call["self"].ndim) if call["dim"] is None else call.dims(),
)
def _extremum(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    """Find the best value along a dim, or of all elements; of equal values the first one counts.

    Each rank finds the first best value of its shard, and every rank compares these.
    """
    call = local_call.call
    result = local_call.outputs[0]
    dim = None if call["dim"] is None else call.dim()
    is_maximum = "max" in call.op.__name__
    with_values = len(call.outputs) == 2
    find: Any = torch.max if is_maximum else torch.min
    worst = identity_of("max" if is_maximum else "min", spec.dtype)
    behind_all = spec.shape.numel()

    def find_here(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first best values of this shard, and their global indices."""
        candidates = x.numel() if dim is None else x.shape[dim]
        if not candidates:
            value = x.new_full(result.local_shape, worst)
            return value, x.new_full(result.local_shape, behind_all, dtype=torch.int64)
        if dim is not None:
            value, place = find(x, dim)
            return value, place + spec.offset(dim)
        value, flat = find(x.reshape(-1), 0)
        index, _ = moved_between_boxes(flat, spec.local_shape, spec.shape, spec.local_offset)
        return value, index

    def run(x: Tensor, *_: Any, **__: Any) -> Any:
        value, index = find_here(x)
        comm = spec.mesh.comm(axes)
        values = all_gather(value.reshape(1, *result.local_shape), comm)
        indices = all_gather(index.reshape(1, *result.local_shape), comm)
        best, _ = find(values, 0)
        # NaN is the best value, and it differs from itself.
        is_worse = (values != best) & (values == values)
        first = indices.masked_fill(is_worse, behind_all).amin(0)
        return (best, first) if with_values else first

    return run


# --- cumulative operators: a local scan, then the totals of the shards before ---------------------


def cumulative(call: OpCall) -> Iterator[Row]:
    """Yield one row per dim; along the scanned dim a total per column is gathered."""
    source = call["self"]
    dim = call.dim()
    columns = prod(n for d, n in enumerate(source.shape) if d != dim)
    total = columns * sum(output.dtype.itemsize for output in call.outputs)
    for d in range(source.ndim):
        if d == dim:
            yield call.row(self=S(d), out=S(d), traffic=lambda ranks: total * ranks)
        else:
            yield call.row(self=S(d), out=S(d))


# the results of a cumulative operator: values and, for `cummax` and `cummin`, their indices
Scan = tuple[Tensor, ...]


def _extreme(wins: Callable[[Tensor, Tensor], Tensor], before: Scan, current: Scan) -> Scan:
    """Return the running extreme and its index; the last of equal values wins, NaN beats all."""
    end, place = before
    values, indices = current
    # NaN differs from itself.
    end_is_number = end == end
    is_nan = values != values
    is_later = wins(values, end) & end_is_number | is_nan
    return torch.where(is_later, values, end), torch.where(is_later, indices, place)


# Functions that combine the end of the scan of all shards before with the scan of one shard alone.
_SCANS: dict[str, Callable[[Scan, Scan], Scan]] = {
    "cumsum": lambda before, current: (before[0] + current[0],),
    "cumprod": lambda before, current: (before[0] * current[0],),
    "logcumsumexp": lambda before, current: (torch.logaddexp(before[0], current[0]),),
    "cummax": partial(_extreme, torch.ge),
    "cummin": partial(_extreme, torch.le),
}


@along_dim
def _scan_shards(local_call: LocalCall, spec: Spec, dim: int) -> LocalFunction:
    """Scan locally and combine with the ends of the shards before, which every rank gathers."""
    scan_shard = functional(local_call.call)
    axes = spec.dim_sharding(dim).axes
    combine = _SCANS[scan_shard.__name__.removesuffix(".default")]
    sizes_before = spec.sizes(dim)[: shard_index(spec, dim)]
    holders = [shard for shard, size in enumerate(sizes_before) if size]

    def gather_ends(scanned: Tensor) -> Tensor:
        """Gather the last element of every shard's scan; an empty shard sends any value."""
        n = scanned.shape[dim]
        if n:
            end = scanned.narrow(dim, n - 1, 1)
        else:
            end = scanned.new_zeros(keepdim_shape(scanned.shape, [dim]))
        return all_gather(end.contiguous(), spec.mesh.comm(axes), dim)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = scan_shard(x, *args, **kwargs)
        scan: Scan = result if isinstance(result, tuple) else (result,)
        if len(scan) == 2:
            values, indices = scan
            scan = (values, indices + spec.offset(dim))
        totals = [gather_ends(scanned) for scanned in scan]
        before = []
        for shard in holders:
            of_shard = [total.narrow(dim, shard, 1) for total in totals]
            before.append(tuple(of_shard))
        if before:
            scan = combine(reduce(combine, before), scan)
        else:
            pairs = zip(scan, totals, strict=True)
            scan = tuple(with_dependence(scanned, total) for scanned, total in pairs)
        return scan if len(scan) == 2 else scan[0]

    return run


ORDERING: Table = family(
    {
        "sort.default sort.stable sort.values sort.values_stable": Rule(comparing(sort), _sort),
        "median nanmedian mode kthvalue": Rule(comparing(sort), _sort),
        "topk": Rule(comparing(topk), _topk),
        "argmax argmin max.dim max.dim_max min.dim min.dim_min": Rule(
            comparing(topk), _extremum, unordered=True, skip_empty=True
        ),
        "cumsum": Rule(cumulative, _scan_shards, sizes=(), linear="self"),
        "cumprod logcumsumexp": Rule(cumulative, _scan_shards, sizes=()),
        "cummax cummin": Rule(comparing(cumulative), _scan_shards),
    }
)
