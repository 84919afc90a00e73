"""Sharding of slices, selections, splits, their gradients, and writes into a slice out of place.

A slice of a sharded dim stays sharded, and is a view of local storage. A selected index is held by
one coordinate, which then has the whole result. A gradient is put into zeros of the longer dim.
Several shardings of the longer dim would fit. The sharding of `torch.chunk` is preferred, because
the forward input most likely had it.

Each map is a value (hashable, printable) from the sharding of one dim to the sharding of another
dim, over the same mesh axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal_mesh import broadcast
from shoal_mesh.internal import with_dependence

from ...layout.boxes import spans
from ...layout.dim_sharding import DimSharding
from ...layout.spec import Spec
from ..language.local_ops import along_dim
from ..language.op_call import ShardingMap
from ..language.rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table, family
from .views import same_dims

aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SliceMap(ShardingMap):
    """The map to a slice: shards keep elements `start`, `start + step`, ... below `stop`.

    Every selected element stands for `unit` elements of the result. For a selected index, `unit` is
    the size of some dim of the result: the shard that has the index holds the whole dim, and the
    other shards hold no elements. A range that reaches over the ends of the dim makes it longer;
    the added elements belong to the first and the last shard.

    Example:
        >>> sharding = DimSharding((0,), (2,), (4, 4))
        >>> SliceMap(1, 7)(sharding).sizes, SliceMap(5, 6, unit=3)(sharding).sizes
        ((3, 3), (0, 3))
        >>> SliceMap(-2, 9, exclusive=True)(sharding).sizes
        (6, 5)
    """

    start: int
    stop: int
    step: int = 1
    unit: int = 1
    # Along a dim that may grow, only one operand may be sharded. The shards of two operands would
    # not be in one order.
    exclusive: bool = False
    # A diagonal may be sharded by rows and by columns; a shard is then the intersection of both.
    intersects: bool = False

    def __call__(self, sharding: DimSharding) -> DimSharding:
        is_inside = 0 <= self.start < self.step and not self.exclusive
        if is_inside and sharding.ragged is None and sharding.step % self.step == 0:
            # Example: x[::2] of shards 4 + 4 has shards 2 + 2.
            length = self.count_before(sharding.length)
            step = sharding.step // self.step
            selected = DimSharding.chunks(sharding.axes, sharding.axis_sizes, length, step)
        else:
            # Example: x[1:7] of shards 4 + 4 has shards 3 + 3.
            selected = sharding.resharded(self.count_before, self.count_before(self.stop))
        return selected.scaled(self.unit)

    def count_before(self, position: int) -> int:
        """Return the number of selected elements before `position`."""
        # Example: x[1::3] has the 3 elements 1, 4 and 7 before position 8.
        elements = min(position, self.stop) - self.start
        return max(0, -(-elements // self.step))


@dataclass(frozen=True, slots=True)
class SliceGradMap(ShardingMap):
    """The inverse of `SliceMap(start, ..., step)`, for shards of `length` elements in total.

    Each shard has the elements of the slice that it had before.

    For a slice of one element, the shard that has this element holds all other elements too, unless
    `torch.chunk` places the element on that shard.
    """

    length: int
    start: int
    step: int = 1

    def __call__(self, sharding: DimSharding) -> DimSharding:
        default = sharding.rechunked(self.length)
        selected = SliceMap(self.start, self.start + sharding.length * self.step, self.step)
        if selected(default) == sharding:
            return default

        def end(n: int) -> int:
            """Return the end of the shard that ends with the first `n` elements of the slice."""
            if n == 0:
                return 0
            if n == sharding.length:
                return self.length
            return self.start + n * self.step

        # Example: x[2:8] of 9 elements has shards 4 + 2. The first shard ends with element 5 of x,
        # so the shards of x are 6 + 3.
        return sharding.resharded(end, self.length)


def selection(call: OpCall, length: int) -> SliceMap:
    """Return the range of `length` elements that a slice selects; an index is a slice of one."""
    if "index" in call.arguments:
        at = call["index"] % length
        return SliceMap(at, at + 1)
    # Computed here because `slice.indices` does not take symbols.
    start = _position(0 if call["start"] is None else call["start"], length)
    stop = _position(length if call["end"] is None else call["end"], length)
    return SliceMap(start, max(start, stop), call["step"])


def _position(index: int, length: int) -> int:
    """Return the position of an end of a slice in a dim: -3 of 8 is 5, 9 is 8."""
    from_start = max(index + length, 0) if index < 0 else index
    return min(from_start, length)


class _SelectedHere(NamedTuple):
    """The elements of a slice in one shard.

    Attributes:
        first: number of selected elements in the shards before this one.
        elements: number of selected elements in the shard.
        bounds: start, stop and step of the local slice.
    """

    first: int
    elements: int
    bounds: tuple[int, int, int]


def _selected_here(call: OpCall, spec: Spec, dim: int) -> _SelectedHere:
    """Return the elements that a slice selects in this rank's shard."""
    selected = selection(call, spec.shape[dim])
    offset = spec.offset(dim)
    # Example: for x[1:7] and the shard 4:8 they are 3 and 6.
    first = selected.count_before(offset)
    stop = selected.count_before(offset + spec.local_shape[dim])
    count = stop - first
    if not count:
        return _SelectedHere(first, 0, (0, 0, 1))
    # Example: x[1::3] selects 1, 4 and 7. In the shard 4:8, element 4 is at the local position 0,
    # and the local slice is 0:4:3.
    start = selected.start + first * selected.step - offset
    last = start + (count - 1) * selected.step
    return _SelectedHere(first, count, (start, last + 1, selected.step))


def slice_(call: OpCall) -> Iterator[Row]:
    """Yield the rows of slices and of `split`, whose results are slices that follow each other."""
    source = call["self"]
    dim = call.dim()
    if "start" in call.arguments:
        maps = [selection(call, source.shape[dim])]
    else:
        # Example: a split into 2 and 3 elements gives 0:2 and 2:5.
        sizes = [output.shape[dim] for output in call.outputs]
        maps = [SliceMap(*span) for span in spans(sizes)]
    yield call.row(self=S(dim), out=[S(dim, map=selected) for selected in maps])
    yield from same_dims(call, ((d, d) for d in range(source.ndim) if d != dim))


@along_dim
def _slice(local_call: LocalCall, spec: Spec, dim: int) -> LocalFunction:
    bounds = _selected_here(local_call.call, spec, dim).bounds
    index = (*[slice(None)] * dim, slice(*bounds))
    return lambda x, *args, **kwargs: x[index]


def _split(local_call: LocalCall) -> LocalFunction | None:
    dim = local_call.call.dim()
    sizes = [output.local_shape[dim] for output in local_call.outputs]
    # This takes 0.4 us less than computing the sizes in every call.
    split = torch.split_with_sizes
    return lambda x, size, at=0: split(x, sizes, dim)


def _without_dim(dim: int, removed: int) -> int:
    """Return the position of a dim after another one is removed: 1 for dim 2 without dim 1."""
    return dim - (dim > removed)


def select(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `select` and `unbind`, which selects every index."""
    source = call["self"]
    dim = call.dim()
    is_one = "index" in call.arguments
    indices = [*range(len(call.outputs))]
    if is_one:
        indices = [call["index"] % source.shape[dim]]
    shape = call.outputs[0].shape if call.outputs else ()
    for d, n in enumerate(shape):
        if n:
            maps = [SliceMap(index, index + 1, unit=n) for index in indices]
            yield call.row(self=S(dim), out=[S(d, map=selected) for selected in maps])
    # The result is one element without dims, so it is broadcast.
    if is_one and not shape:
        yield call.row(self=S(dim), traffic=lambda ranks: source.dtype.itemsize, ordered=True)
    others = [d for d in range(source.ndim) if d != dim]
    yield from same_dims(call, ((d, _without_dim(d, dim)) for d in others))


@along_dim
def _select(local_call: LocalCall, spec: Spec, dim: int) -> LocalFunction:
    """Return a function that selects from a sharded dim; a result without dims is broadcast."""
    sharding = spec.dim_sharding(dim)
    index = local_call.call["index"] % spec.shape[dim]
    # Example: x[5] is row 1 of the shard with 4:8.
    at = index - spec.offset(dim)
    if local_call.outputs[0].ndim:
        return lambda x, *args: x.select(dim, at)
    holds = 0 <= at < spec.local_shape[dim]
    src = sharding.shard_with(index)

    def broadcast_one(x: Tensor, *args: Any) -> Tensor:
        operand = x[at].clone() if holds else with_dependence(x.new_empty(()), x)
        return broadcast(operand, spec.mesh.comm(sharding.axes), src)

    return broadcast_one


@along_dim
def _unbind(local_call: LocalCall, spec: Spec, dim: int) -> LocalFunction:
    """Return a function whose results are empty unless this rank has their index."""
    # Example: on the shard with 4:8, result 5 is row 5 - 4.
    first = spec.offset(dim)
    count = spec.local_shape[dim]
    shapes = [output.local_shape for output in local_call.outputs]

    def run(x: Tensor, *args: Any) -> list[Tensor]:
        local_rows = aten.unbind.int(x, dim)
        # Empty results are parts of `x`, because the graphs of compiled code must use `x` on all
        # ranks.
        empty = x.narrow(0, 0, 0)
        results = []
        for i, shape in enumerate(shapes):
            position = i - first
            is_local = 0 <= position < count
            results.append(local_rows[position] if is_local else empty.reshape(shape))
        return results

    return run


# --- gradients, which are put into zeros ----------------------------------------------------------


def slice_backward(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `slice_backward` and `select_backward`.

    A gradient that is held by one coordinate stays on the coordinate that holds the selected index.
    """
    dim = int(call["dim"]) % len(call["input_sizes"])
    is_one = "index" in call.arguments
    gradient = call["grad_output"]
    length = call["input_sizes"][dim]
    other_dims = [d for d in range(call.outputs[0].ndim) if d != dim]
    for d in other_dims:
        gradient_dim = _without_dim(d, dim) if is_one else d
        yield from same_dims(call, [(gradient_dim, d)])
    selected = selection(call, length)
    back = S(dim, map=SliceGradMap(length, selected.start, selected.step))
    if not is_one:
        yield call.row(grad_output=S(dim), out=back)
        return
    # One coordinate has the whole gradient of a selection.
    for d, n in enumerate(gradient.shape):
        if n:
            yield call.row(grad_output=S(d, n), out=back)


def _slice_backward(local_call: LocalCall) -> LocalFunction:
    """Fill zeros with the shard's part of the slice, or with the selected index."""
    call = local_call.call
    grad = local_call["grad_output"]
    target = local_call.outputs[0]
    dim = int(call["dim"]) % target.ndim
    shape = target.local_shape
    is_one = "index" in call.arguments
    _, count, bounds = _selected_here(call, target, dim)
    has_gradient = count and 0 not in grad.local_shape

    def run(g: Tensor, *args: Any) -> Tensor:
        full = g.new_zeros(shape)
        if has_gradient:
            part = aten.slice.Tensor(full, dim, *bounds)
            part.copy_(g.unsqueeze(dim) if is_one else g)
        return full

    return run


def slice_scatter(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `slice_scatter` and `select_scatter`, whose source lacks the dim."""
    dim = call.dim()
    is_one = "index" in call.arguments
    for d in range(call["self"].ndim):
        if d != dim:
            dim_of_source = _without_dim(d, dim) if is_one else d
            yield call.row(self=S(d), src=S(dim_of_source), out=S(d))
    yield call.row(self=S(dim), out=S(dim))


@along_dim
def _slice_scatter(local_call: LocalCall, spec: Spec, dim: int) -> LocalFunction:
    """Replace this shard's part of the slice."""
    is_one = "index" in local_call.call.arguments
    first, count, bounds = _selected_here(local_call.call, spec, dim)

    def run(x: Tensor, src: Tensor, *args: Any, **kwargs: Any) -> Any:
        src = src.unsqueeze(dim) if is_one else src
        return aten.slice_scatter.default(x, src.narrow(dim, first, count), dim, *bounds)

    return run


SLICING: Table = family(
    {
        "slice.Tensor": Rule(slice_, _slice, moves="self"),
        "split.Tensor split_with_sizes.default": Rule(slice_, _split, moves="self"),
        "unsafe_split.Tensor unsafe_split_with_sizes.default": Rule(slice_, _split, moves="self"),
        "select.int": Rule(select, _select, skip_empty=True, moves="self"),
        "unbind.int": Rule(select, _unbind, moves="self"),
        "slice_backward.default select_backward.default": Rule(
            slice_backward, _slice_backward, linear="grad_output"
        ),
    },
    unordered=True,
) | family({"slice_scatter select_scatter": Rule(slice_scatter, _slice_scatter, moves="self src")})
