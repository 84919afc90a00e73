"""Helpers for local functions: replaced arguments, reductions, indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_reduce

from ..._torch.operators import assert_on_device
from ..._torch.tensors import TRACED
from ...errors import OperatorArgumentError, OperatorIndexError
from ...layout.spec import Spec
from ...layout.tensor_meta import TensorMeta
from .rule import (
    Check,
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
    Traffic,
    in_every_form as in_every_form,
    is_empty_shard,
)


def sharding_axes(spec: Spec, dims: Iterable[int] | None = None) -> tuple[int, ...]:
    """Return the mesh axes that shard any of the tensor dims `dims`, ascending.

    Args:
        spec: the spec of a tensor.
        dims: tensor dims; all of them when left out.

    Example:
        >>> from shoal_dtensor import Replicate, Shard, Spec
        >>> from shoal_mesh import abstract_mesh
        >>> mesh = abstract_mesh((2, 2, 2))
        >>> sharding_axes(Spec(mesh, (Shard(1), Replicate(), Shard(1)), (8, 8)), dims=[1])
        (0, 2)
    """
    chosen = range(spec.ndim) if dims is None else dims
    axes = {axis for dim in chosen for axis in spec.dim_shardings[dim].axes}
    return tuple(sorted(axes))


def shard_index(spec: Spec, dim: int) -> int:
    """Return the index of this rank's shard of a sharded dim; 0 outside the mesh."""
    coordinate = spec.coordinate or (0,) * spec.mesh.ndim
    return spec.dim_sharding(dim).index(coordinate)


def keepdim_shape(shape: Iterable[int], dims: Iterable[int]) -> list[int]:
    """Return the shape of a reduction over these dims that keeps them, with size 1."""
    sizes = [*shape]
    for dim in dims:
        sizes[dim] = 1
    return sizes


def all_reduced(tensor: Tensor, spec: Spec, axes: tuple[int, ...], op: str = "sum") -> Tensor:
    """Reduce `tensor` over axes of `spec`'s mesh; return `tensor` itself if there are none.

    Args:
        tensor: a local tensor, of the same shape on all ranks along the axes.
        spec: the spec of any tensor on the mesh.
        axes: indices of mesh axes, such as `sharding_axes` returns.
        op: "sum", "avg", "max", "min" or "product".

    Returns:
        The reduced tensor, or `tensor` itself without axes.

    Example:
        >>> from shoal_dtensor import Shard, Spec
        >>> from shoal_mesh import abstract_mesh
        >>> all_reduced(torch.ones(2), Spec(abstract_mesh((4,)), (Shard(0),), (8, 2)), axes=())
        tensor([1., 1.])
    """
    return all_reduce(tensor, spec.mesh.comm(axes), op) if axes else tensor


def bytes_of(*tensors: TensorMeta) -> int:
    """Return the total number of bytes of global tensors."""
    # Example: (4, 6) of float32 has 96 bytes.
    return sum(prod(t.shape) * t.dtype.itemsize for t in tensors)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over shards: float32 for half types, whose sums may overflow."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def wide_bytes_of(*tensors: TensorMeta) -> int:
    """Return the total number of bytes of global tensors in their `wide_dtype`."""
    return sum(prod(t.shape) * wide_dtype(t.dtype).itemsize for t in tensors)


def all_reduce_traffic(nbytes: float) -> Traffic:
    """Return the traffic of a row that all-reduces `nbytes` bytes.

    An all-reduce is counted as a reduce-scatter and an all-gather.

    Example:
        >>> all_reduce_traffic(100)(4)
        150.0
    """
    return lambda ranks: 2 * nbytes * (ranks - 1) / ranks


def mean_rows(call: OpCall, row: Row) -> Iterator[Row]:
    """Yield the two rows of a mean along a factor, given the row of its sum.

    Only the first result is a mean.

    For even shards, the result is partial: the average of the shards' means, as in torch. For
    uneven shards the mean is not the average of the shards' means, so the result is all-reduced. It
    is not left as a partial sum, because `to_local` would show a rank's summand as if it were the
    mean. Means of half types are all-reduced in float32.
    """
    own_traffic = row.traffic or (lambda ranks: 0.0)
    reduced = all_reduce_traffic(wide_bytes_of(call.outputs[0]))

    def traffic(ranks: int) -> float:
        return own_traffic(ranks) + reduced(ranks)

    other_outputs = row.outputs[1:]
    yield replace(row, outputs=(P("avg"), *other_outputs), even=True)
    yield replace(row, outputs=(R, *other_outputs), traffic=traffic)


def mean_of_sums(local_call: LocalCall, axes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Return a function that converts this rank's part of a mean to the result of `mean_rows`.

    The part is this rank's sum divided by the global count, in the `wide_dtype` of the mean. The
    elements of the sum are sharded by `axes`.
    """
    result = local_call.outputs[0]
    averaged_axes = [axis for axis, op in result.partials if op == "avg"]
    averaged = {axis for axis in averaged_axes if axis in axes}
    # A partial average divides by the number of ranks, so a part is multiplied by it. Example: on 2
    # ranks, a part of 3 becomes 6.
    ranks = prod(result.mesh.shape[axis] for axis in averaged)
    others = tuple(axis for axis in axes if axis not in averaged)

    def all_reduce_mean(part: Tensor) -> Tensor:
        return all_reduced(part * ranks if ranks > 1 else part, result, others)

    if wide_dtype(result.dtype) is result.dtype:
        return all_reduce_mean
    return lambda part: all_reduce_mean(part).to(result.dtype)


Local = Callable[[LocalCall], LocalFunction | None]


def functional(call: OpCall) -> Any:
    """Return the operator's functional form; the default overload if no other has its arguments."""
    name, _, overload = call.op.__name__.partition(".")
    packet = getattr(torch.ops.aten, name.removesuffix("_"))
    # Example: "Tensor" for the overload "Tensor_out".
    without_out = overload.removesuffix("out").rstrip("_")
    is_out = overload.endswith("out")
    return getattr(packet, without_out if is_out and without_out else "default")


def on_functional_form(local: Local) -> Local:
    """Decorate a local function to be called for the functional form of an `out=` overload.

    The targets get the results afterwards. Other overloads are unchanged.
    """

    @wraps(local)
    def decide(local_call: LocalCall) -> LocalFunction | None:
        call = local_call.call
        outs = call.schema.outs
        if not outs:
            return local(local_call)
        arguments = {name: value for name, value in call.kwargs.items() if name not in outs}
        functional_call = replace(call, op=functional(call), kwargs=arguments)
        function = local(replace(local_call, call=functional_call))
        return None if function is None else in_every_form(call, function)

    return decide


def with_arguments(call: OpCall, **changes: Any) -> LocalFunction:
    """Return the operator with the arguments named in `changes` replaced."""
    op = call.op
    # Example: for view(self, size), the place of `size` is 1.
    names = (*call.schema.inputs, *call.schema.outs)
    places = {name: i for i, name in enumerate(names)}
    positions = tuple((places[name], name, value) for name, value in changes.items())

    def run(*args: Any, **kwargs: Any) -> Any:
        changed = list(args)
        for place, name, value in positions:
            if place < len(changed):
                changed[place] = value
            else:
                kwargs[name] = value
        return op(*changed, **kwargs)

    return run


def where_sharded(
    local: Callable[[LocalCall, Spec, tuple[int, ...]], LocalFunction | None],
    dims: Callable[[OpCall], Sequence[int]] | None = None,
) -> Local:
    """Decorate a local function to be called only where `dims` of the first tensor are sharded.

    The function is called for the operator's functional form.
    """

    @wraps(local)
    def decide(local_call: LocalCall) -> LocalFunction | None:
        call = local_call.call
        spec = local_call.inputs[0]
        axes = sharding_axes(spec, None if dims is None else dims(call))
        function = local(local_call, spec, axes) if axes else None
        return None if function is None else in_every_form(call, function)

    return decide


def along_dim(local: Callable[[LocalCall, Spec, int], LocalFunction]) -> Local:
    """Decorate a local function like `where_sharded`, for the dim that the argument `dim` names.

    The function receives the spec of the first tensor and that dim.
    """

    def along(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
        return local(local_call, spec, local_call.call.dim())

    def dims(call: OpCall) -> Sequence[int]:
        return () if call.get("dim") is None else call.dims()

    return where_sharded(along, dims)


# --- global indices, on a rank that holds an interval of the indexed dim --------------------------


def check_values(is_valid: Tensor, message: str) -> None:
    """Raise an error on the ranks that have the values if some are not valid.

    On an accelerator the device raises the error later. Compiled code raises a RuntimeError when it
    runs.
    """
    if is_valid.device.type != "cpu" or isinstance(is_valid, TRACED):
        assert_on_device(is_valid.all(), message)
    elif not is_valid.all():
        raise OperatorArgumentError(message)


def check_bounds(index: Tensor, is_valid: Tensor, length: int) -> None:
    """Raise an error for indices into `length` elements that are out of range.

    A rank looks up only the indices that fall into its shard, so no kernel would notice an index
    that is in no shard. Ranks with empty shards check too: all ranks with the same indices raise.
    On an accelerator the device reports it later, as plain indexing does; compiled code raises
    RuntimeError when it runs.
    """
    message = f"out of bounds for a dim of {length} elements"
    if index.device.type != "cpu" or isinstance(index, TRACED):
        assert_on_device(is_valid.all(), f"index {message}")
    elif not is_valid.all():
        first = index[~is_valid].reshape(-1)[0].item()
        raise OperatorIndexError(f"index {first} is {message}")


def check_indices(index: Tensor, length: int, *, from_end: bool = False) -> None:
    """Raise an error for indices outside 0 to `length - 1`.

    Indices from `-length` to -1 are valid too if they may count from the end (`from_end`).
    """
    lowest = -length if from_end else 0
    check_bounds(index, (index >= lowest) & (index < length), length)


def index_check(
    call: OpCall, argument: str, length: Callable[[OpCall], int], *, from_end: bool = False
) -> dict[str, list[Check]]:
    """Return the `checks` of a rule whose argument has indices into `length` elements."""
    return {argument: [partial(check_indices, length=length(call), from_end=from_end)]}


def compares_indices(
    local: Local, argument: str, length: Callable[[OpCall], int], *, from_end: bool = False
) -> Local:
    """Decorate `local` to raise the same index errors on all ranks where it runs the kernel.

    A kernel without elements to read or write does not compare indices, so a rank with an empty
    shard would continue where the other ranks raise. For a shard of a few columns some kernels
    raise a RuntimeError where other kernels raise an IndexError: `OperatorIndexError` is both.

    Args:
        local: the local function of a rule. If it returns a function, this function compares the
            indices itself.
        argument: the name of the argument with the indices.
        length: returns the number of elements of the indexed dim.
        from_end: whether negative indices count from the end.
    """

    @wraps(local)
    def decide(local_call: LocalCall) -> LocalFunction | None:
        function = local(local_call)
        call = local_call.call
        if function is not None or all(spec.replicated for spec in local_call.inputs):
            return function
        op = call.op
        count = length(call)
        place = call.schema.positional.index(argument)
        has_nothing = any(is_empty_shard(spec) for spec in local_call.inputs)

        def run(*args: Any, **kwargs: Any) -> Any:
            if has_nothing:
                check_indices(args[place], count, from_end=from_end)
            try:
                return op(*args, **kwargs)
            except RuntimeError:
                check_indices(args[place], count, from_end=from_end)
                raise

        return run

    return decide


def from_the_front(index: Tensor, length: int) -> Tensor:
    """Convert valid indices that count from the end (-1 is the last) to count from the front."""
    check_indices(index, length, from_end=True)
    # Example: [-1, 2] in a dim of 5 elements becomes [4, 2].
    return torch.where(index < 0, index + length, index)


def local_positions(
    index: Tensor, spec: Spec, dim: int, *, from_end: bool = True
) -> tuple[Tensor, Tensor]:
    """Return local positions of global indices into a sharded dim, and whether they are local.

    An index that is not local gets position 0.
    """
    # Example: 8 elements on 2 ranks. On rank 1, the indices 1, 5 and -1 have the positions 0, 1 and
    # 3, and only the first is not local.
    if from_end:
        return in_shard(from_the_front(index, spec.shape[dim]), spec, dim)
    check_indices(index, spec.shape[dim])
    return in_shard(index, spec, dim)


def in_shard(index: Tensor, spec: Spec, dim: int) -> tuple[Tensor, Tensor]:
    """Return local positions and whether they are local, for indices that count from the front.

    Indices may be out of range: they are not local. See `local_positions`.
    """
    # Example: on the rank with 4:8, the indices 1, 5 and 7 have the positions -3, 1 and 3. The last
    # two are local.
    position = index - spec.offset(dim)
    is_local = (position >= 0) & (position < spec.local_shape[dim])
    return position.masked_fill(~is_local, 0), is_local


def moved_between_boxes(
    index: Tensor, source: Sequence[int], target: Sequence[int], shift: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Convert flat positions in one box to flat positions in another; tell whether they are inside.

    A position outside the other box becomes a position at its edge.

    Args:
        index: flat positions in row-major order.
        source: the shape of the box in which the positions are given.
        target: the shape of the other box.
        shift: for each dim, the position in the other box minus the position in the first one.

    Example:
        Element 7 of a (3, 4) tensor is in row 1 and column 3. On the rank with columns 2..3 it is
        in row 1 and column 1, so it is element 3.

        >>> moved_between_boxes(torch.tensor([7, 4]), (3, 4), (3, 2), (0, -2))
        (tensor([3, 2]), tensor([ True, False]))
    """
    position = torch.zeros_like(index)
    is_inside = torch.ones_like(index, dtype=torch.bool)
    step = 1
    sizes = zip(reversed(source), reversed(target), reversed(shift), strict=True)
    for size, length, by in sizes:
        # In the example for 7: the column is 7 % 4 - 2 = 1, then the row is 1 % 3 + 0 = 1.
        place = index % size + by
        is_inside &= (place >= 0) & (place < length)
        at_most_the_edge = place.clamp(0, max(length - 1, 0))
        position = position + at_most_the_edge * step
        index = index // size
        step *= length
    return position, is_inside
