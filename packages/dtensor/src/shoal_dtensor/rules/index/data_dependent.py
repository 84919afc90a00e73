"""Sharding of operators that select by values, and of searches and counts of values.

Operators that select by values are for example nonzero, unique and masked_select.

Each rank selects from its own shard. Every rank then gathers the results of all ranks in global
order, so the result is replicated and has the same length as on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_gather, all_gather_v

from ..._torch.tensors import in_backward
from ...host_memory import device_of_numbers, upload
from ...layout.boxes import box_at, slices_of
from ...layout.memory_order import contiguous_stride
from ...layout.spec import Spec
from ...layout.tensor_meta import TensorMeta
from ...redistribute.execution.reduced_values import identity_of
from ..language.local_ops import all_reduced, check_values, sharding_axes, where_sharded
from ..language.rule import (
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    Row,
    Rule,
    S,
    Table,
    Traffic,
    family,
    no_rows,
)
from ..shape.views import expand


def gather_results(spec: Spec, axes: tuple[int, ...], *results: Tensor) -> list[Tensor]:
    """Gather the results of all ranks along mesh axes, one after the other.

    The number of results differs from rank to rank.
    """
    comm = spec.mesh.comm(axes)
    device = device_of_numbers(comm, results[0].device)
    count = upload([len(results[0])], device)
    counts = all_gather(count, comm).tolist()
    return [all_gather_v(tensor.contiguous(), comm, counts) for tensor in results]


def in_global_order(
    spec: Spec, axes: tuple[int, ...], positions: Tensor, *results: Tensor
) -> list[Tensor]:
    """Gather positions and results of all ranks and sort them in row-major order of the positions.

    Positions are global, of shape `(count, ndim)`.
    """
    positions = positions + upload(spec.local_offset, positions.device, positions.dtype)
    positions, *results_of_all = gather_results(spec, axes, positions, *results)
    strides = upload(contiguous_stride(spec.shape), positions.device, positions.dtype)
    order = (positions * strides).sum(1).argsort()
    return [positions[order], *(tensor[order] for tensor in results_of_all)]


def selected_by(mask: Tensor, spec: Spec, axes: tuple[int, ...], x: Tensor) -> Tensor:
    """Return the elements of `x` that a sharded mask selects, on every rank.

    `spec` is the spec of the mask, or of a tensor that is sharded like the mask.
    """
    positions = mask.nonzero()
    return in_global_order(spec, axes, positions, x[positions.unbind(1)])[1]


def assumed_result_bytes(call: OpCall) -> Traffic:
    """Return the assumed traffic of gathering results: fewer bytes than the input has elements.

    The number of results is unknown before the operator runs.
    """
    source = call["self"]
    rows = source.shape[0] if source.ndim else 1
    return lambda ranks: max(rows, 1)


def _sparse(local_call: LocalCall) -> LocalFunction:
    """Return the dense gradient of an embedding if the call is in a backward pass."""
    op = local_call.call.op

    def run(
        dims: int, dense_dims: int, size: Any, indices: Tensor, values: Tensor, **kwargs: Any
    ) -> Tensor:
        if in_backward() and dims == 1:
            return values.new_zeros(size).index_add_(0, indices[0], values)
        result: Tensor = op(dims, dense_dims, size, indices, values, **kwargs)
        return result

    return run


def nonzero(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `nonzero`, `masked_select`, and `unique` without inverse indices.

    The inverse indices of `unique` are as large as the input.
    """
    source = call["self"]
    mask = call.get("mask")
    traffic = assumed_result_bytes(call)
    if call.get("return_inverse"):
        return
    if mask is not None and mask.shape != source.shape:
        return
    for d in range(source.ndim):
        entries = {} if mask is None else {"mask": S(d)}
        yield call.row(entries, self=S(d), traffic=traffic)


@where_sharded
def _nonzero(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    if "mask" in local_call.call.places:
        return lambda x, mask: selected_by(mask, spec, axes, x)
    return lambda x: in_global_order(spec, axes, x.nonzero())[0]


@where_sharded
def _unique(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    """Compute the unique values of the values of all shards; sum the counts over shards."""
    counted = bool(local_call.call.get("return_counts"))
    count = len(local_call.call.schema.returns)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        values, counts = torch.unique(x, return_counts=True)
        values, counts = gather_results(spec, axes, values, counts)
        values, inverse = torch.unique(values, return_inverse=True)
        total = torch.zeros(len(values), dtype=counts.dtype, device=x.device)
        total.index_add_(0, inverse, counts)
        no_indices = x.new_empty(0, dtype=torch.int64)
        counts_of_all = total if counted else no_indices
        return (values, no_indices, counts_of_all)[:count]

    return run


def _masked_scatter(local_call: LocalCall) -> LocalFunction | None:
    """Copy the source elements for this rank's shard.

    The mask is replicated, so every rank can count the elements that are taken before each of its
    own elements.
    """
    spec = local_call.outputs[0]
    is_written = bool(local_call.call.written)
    own_box = slices_of(box_at(spec.local_offset, spec.local_shape))
    if not sharding_axes(spec):
        return None

    def run(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        mask = mask.expand(spec.shape)
        _check_count(mask, source)
        # the position in the source of the element for each true element of the mask
        counts = mask.reshape(-1).cumsum(0)
        taken = (counts - 1).view(spec.shape)
        local_mask = mask[own_box]
        local_taken = taken[own_box]
        result = x if is_written else x.expand(spec.local_shape).clone()
        result[local_mask] = source.reshape(-1)[local_taken[local_mask]]
        return result

    return run


def _check_count(mask: Tensor, source: Tensor) -> None:
    """Raise an error if the source has fewer elements than the mask selects."""
    present = source.numel()
    check_values(
        mask.sum() <= present,
        f"masked_scatter: the mask selects more than the {present} elements of source",
    )


def searchsorted(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `searchsorted` and `bucketize`: counts of boundaries add up over shards.

    A sorter has global indices, so boundaries with a sorter are not sharded.
    """
    boundaries = "boundaries" if "boundaries" in call.arguments else "sorted_sequence"
    last = call[boundaries].ndim - 1
    values = call["self"]
    for d in range(values.ndim if isinstance(values, TensorMeta) else last):
        # Rows of boundaries belong to rows of values.
        rows = {boundaries: S(d), "sorter": S(d)} if d < last else {}
        yield call.row(rows, self=S(d), out=S(d))
    if call.get("sorter") is None:
        yield call.row({boundaries: S(last)}, out=P("sum"))


def isin(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `isin`: a value is in any shard of the set or, inverted, in none."""
    in_any_shard = P("min" if call["invert"] else "max")
    elements = call.get("elements")
    if isinstance(elements, TensorMeta):
        for d in range(elements.ndim):
            yield call.row(elements=S(d), out=S(d))
    tests = call.get("test_elements")
    if isinstance(tests, TensorMeta):
        for d in range(tests.ndim):
            yield call.row(test_elements=S(d), out=in_any_shard)


def histc(call: OpCall) -> Iterator[Row]:
    has_bounds = call["min"] != call["max"]
    two_bounds = 2 * call["self"].dtype.itemsize
    traffic: Traffic | None = None if has_bounds else lambda ranks: two_bounds
    for d in range(call["self"].ndim):
        yield call.row(self=S(d), out=P("sum"), traffic=traffic)


def _histc(local_call: LocalCall) -> LocalFunction | None:
    """Count the shard's elements in bins; without given bounds, use the bounds of all elements.

    A count is the sum over shards.
    """
    call = local_call.call
    spec = local_call["self"]
    axes = sharding_axes(spec)
    op = call.op
    bins = call["bins"]
    has_bounds = call["min"] != call["max"]
    if has_bounds or not axes or not spec.shape.numel():
        return None

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.numel():
            lowest = x.amin()
            highest = x.amax()
        else:
            lowest = x.new_full((), identity_of("min", x.dtype))
            highest = x.new_full((), identity_of("max", x.dtype))
        lowest = all_reduced(lowest, spec, axes, "min")
        highest = all_reduced(highest, spec, axes, "max")
        low, high = torch.stack((lowest, highest)).tolist()
        # For equal bounds torch would compute the bounds of the shard. It widens equal bounds of
        # the elements by one on each side.
        widening = 1 if low == high else 0
        return op(x, bins, low - widening, high + widening, **kwargs)

    return run


def bincount(call: OpCall) -> Iterator[Row]:
    """Yield the row of `bincount`, whose result has a data-dependent length.

    The traffic is estimated for at least 64 bins.
    """
    bins = max(int(call["minlength"]), 64)
    yield call.row(self=S(0), weights=S(0), traffic=lambda ranks: 8 * bins)


@where_sharded
def _bincount(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    """Sum the counts of the shards, for as many bins as the shard with the largest value needs."""

    def run(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if x.numel():
            top = x.max() + 1
        else:
            top = torch.zeros((), dtype=x.dtype, device=x.device)
        needed = all_reduced(top.to(torch.int64), spec, axes, "max")
        length = max(minlength, int(needed.item()))
        counts = torch.bincount(x, weights, length)
        # Without elements, torch's counts are integers even if there are weights.
        if weights is not None and not x.numel():
            is_single = weights.dtype == torch.float32
            counts = counts.to(torch.float32 if is_single else torch.float64)
        return all_reduced(counts, spec, axes)

    return run


DATA_DEPENDENT: Table = family(
    {
        "nonzero.default masked_select.default": Rule(nonzero, _nonzero, kind="dynamic"),
        "_unique2.default _unique.default": Rule(nonzero, _unique, kind="dynamic"),
        # These compare adjacent elements or whole slices.
        "unique_dim.default unique_consecutive.default repeat_interleave.Tensor": Rule(
            no_rows, kind="dynamic"
        ),
        "nonzero_static.default": Rule(no_rows),
        # A DTensor cannot have a sparse layout: the result is a plain tensor, the same on every
        # rank.
        "_to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc": Rule(
            no_rows, kind="dynamic"
        ),
        "_sparse_coo_tensor_with_dims_and_tensors": Rule(no_rows, _sparse, kind="dynamic"),
        "masked_scatter.default masked_scatter_.default": Rule(expand, _masked_scatter),
        "masked_scatter_backward.default": Rule(no_rows),
        "searchsorted bucketize": Rule(searchsorted),
        "isin": Rule(isin),
        "histc": Rule(histc, _histc),
        "bincount.default": Rule(bincount, _bincount, kind="dynamic"),
    }
)
