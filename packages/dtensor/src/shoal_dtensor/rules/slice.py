"""Sharding of slices, selections and splits, and of their gradients.

A slice of a sharded dim stays sharded: each piece keeps what it has of the selected range, a view of local storage.
A selected index lies with one coordinate; the result is cut so that this coordinate has all of it.
Gradients are embedded in zeros, the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import broadcast

from .notation import linear_rows
from .rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from .view import any_partial, kept_dims
from .window import Around, Embed, Owner, Window, local_bounds, owner_of, window_of

__all__ = ["SLICE"]

aten = torch.ops.aten


def _others(ndim: int, dim: int, outputs: int = 1) -> list[Row]:
    return kept_dims(((d, d) for d in range(ndim) if d != dim), outputs)


# --- slices and splits ------------------------------------------------------------------------------------------------


def slice_rows(call: OpCall) -> list[Row]:
    (source,), dim = call.tensors, call.dim()
    rows = [Row((S(dim),), (S(dim, cut=window_of(call, source.shape[dim])),))]
    return rows + _others(source.ndim, dim) + any_partial(1, 1)


def slice_local(call: LocalCall) -> LocalFunction | None:
    dim, spec = call.call.dim(), call.inputs[0]
    if not spec.cuts[dim].axes:
        return None
    window = window_of(call.call, spec.shape[dim])
    bounds = local_bounds(window, spec.offset(dim), call.outputs[0].local_shape[dim])
    index = (*[slice(None)] * dim, slice(*bounds))
    return lambda x, *args, **kwargs: x[index]


def _split_windows(call: OpCall) -> list[Window]:
    """The range of every output of a split."""
    dim, start, windows = call.dim(), 0, []
    for output in call.outputs:
        windows.append(Window(start, start + output.shape[dim]))
        start += output.shape[dim]
    return windows


def split_rows(call: OpCall) -> list[Row]:
    (source,), dim, count = call.tensors, call.dim(), len(call.outputs)
    rows = [Row((S(dim),), tuple(S(dim, cut=window) for window in _split_windows(call)))]
    return rows + _others(source.ndim, dim, count) + any_partial(1, count)


def split_local(call: LocalCall) -> LocalFunction | None:
    dim = call.call.dim()
    sizes = [output.local_shape[dim] for output in call.outputs]
    split = torch.split_with_sizes  # 0.4 us less than working the sizes out at every call
    return lambda x, size, at=0: split(x, sizes, dim)


# --- selections -------------------------------------------------------------------------------------------------------


def _after(dim: int, removed: int) -> int:
    return dim - (dim > removed)


def select_rows(call: OpCall) -> list[Row]:
    (source,), (target,), dim = call.tensors, call.outputs, call.dim()
    index = call["index"] % source.shape[dim]
    rows = [Row((S(dim),), (S(d, cut=Owner(index, n)),)) for d, n in enumerate(target.shape) if n]
    if not target.ndim:
        rows = [Row((S(dim),), (R,), traffic=source.dtype.itemsize, ordered=True)]
    others = kept_dims((d, _after(d, dim)) for d in range(source.ndim) if d != dim)
    return rows + others + any_partial(1, 1)


def select_local(call: LocalCall) -> LocalFunction | None:
    dim, spec, shape = call.call.dim(), call.inputs[0], call.outputs[0].local_shape
    if not (cut := spec.cut(dim)).axes:
        return None
    index = call.call["index"] % spec.shape[dim]
    at = index - spec.offset(dim)
    mine = 0 <= at < spec.local_shape[dim]
    if shape or call.outputs[0].ndim:
        return (lambda x, *args: x.select(dim, at)) if mine else (lambda x, *args: _nothing(x, shape))
    src = owner_of(cut, index)
    return lambda x, *args: broadcast(x[at].clone() if mine else x.new_empty(()), spec.mesh.comm(cut.axes), src)


def _nothing(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A part without elements, made of `x`: a compiler must see that every rank uses it, or ranks' graphs differ."""
    return x.narrow(0, 0, 0).reshape(shape)


def unbind_rows(call: OpCall) -> list[Row]:
    (source,), dim, count = call.tensors, call.dim(), len(call.outputs)
    shape = call.outputs[0].shape if count else ()
    rows = [Row((S(dim),), tuple(S(d, cut=Owner(i, n)) for i in range(count))) for d, n in enumerate(shape) if n]
    others = kept_dims(((d, _after(d, dim)) for d in range(source.ndim) if d != dim), count)
    return rows + others + any_partial(1, count)


def unbind_local(call: LocalCall) -> LocalFunction | None:
    dim, spec = call.call.dim(), call.inputs[0]
    if not spec.cuts[dim].axes:
        return None
    first, held = spec.offset(dim), spec.local_shape[dim]
    shapes = [output.local_shape for output in call.outputs]

    def run(x: Tensor, *args: Any) -> list[Tensor]:
        mine = aten.unbind.int(x, dim)
        return [mine[i - first] if 0 <= i - first < held else _nothing(x, s) for i, s in enumerate(shapes)]

    return run


# --- gradients: embedding in zeros ------------------------------------------------------------------------------------


def _grad_dim(call: OpCall) -> int:
    return int(call["dim"]) % len(call["input_sizes"])


def slice_backward_rows(call: OpCall) -> list[Row]:
    dim, length = _grad_dim(call), call["input_sizes"][_grad_dim(call)]
    window = window_of(call, length)
    rows = [Row((S(dim),), (S(dim, cut=Embed(length, window.start, window.step)),))]
    return rows + _others(call.outputs[0].ndim, dim) + linear_rows((0,), 1, 1)


def slice_backward_local(call: LocalCall) -> LocalFunction:
    dim, grad, target = _grad_dim(call.call), call.inputs[0], call.outputs[0]
    window, shape = window_of(call.call, target.shape[dim]), target.local_shape
    start, stop, step = local_bounds(window, target.offset(dim), grad.local_shape[dim])

    def run(g: Tensor, *args: Any) -> Tensor:
        full = g.new_zeros(shape)
        aten.slice.Tensor(full, dim, start, stop, step).copy_(g)
        return full

    return run


def select_backward_rows(call: OpCall) -> list[Row]:
    (grad,), dim, length = call.tensors, _grad_dim(call), call["input_sizes"][_grad_dim(call)]
    around = Around(length, call["index"] % length)
    # The gradient of what one coordinate holds goes back to where it was taken from.
    rows = kept_dims((d, d + (d >= dim)) for d in range(grad.ndim))
    rows += [Row((S(d, n),), (S(dim, cut=around),)) for d, n in enumerate(grad.shape) if n]
    return rows + linear_rows((0,), 1, 1)


def select_backward_local(call: LocalCall) -> LocalFunction:
    dim, grad, target = _grad_dim(call.call), call.inputs[0], call.outputs[0]
    at = call.call["index"] % target.shape[dim] - target.offset(dim)
    mine = 0 <= at < target.local_shape[dim] and 0 not in grad.local_shape
    shape = target.local_shape

    def run(g: Tensor, *args: Any) -> Tensor:
        full = g.new_zeros(shape)
        if mine:
            aten.select.int(full, dim, at).copy_(g)
        return full

    return run


SPLIT = Rule(split_rows, split_local, unordered=True)

SLICE: Table = {
    aten.slice.Tensor: Rule(slice_rows, slice_local, unordered=True),
    aten.select.int: Rule(select_rows, select_local, unordered=True),
    aten.unbind.int: Rule(unbind_rows, unbind_local, unordered=True),
    aten.slice_backward.default: Rule(slice_backward_rows, slice_backward_local, unordered=True),
    aten.select_backward.default: Rule(select_backward_rows, select_backward_local, unordered=True),
} | dict.fromkeys(
    (
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    ),
    SPLIT,
)
