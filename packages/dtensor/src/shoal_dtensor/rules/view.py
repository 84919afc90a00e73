"""Sharding of views that rearrange dims: reshapes, permutations, broadcasts, windows and reinterpretations.

Every local call is a view of local storage, so what is written through the result reaches its base.  A cut that
has no row is gathered by the propagator, which marks the result as no view of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..placements import REDUCE_OPS, Partial
from .notation import linear_rows
from .rule import ANY_NORM, LocalCall, LocalFunction, OpCall, P, Row, Rule, S, Table
from .viewmap import reshape_moves

__all__ = ["VIEW", "any_partial", "kept_dims", "rearrangement", "with_input_sizes"]

aten = torch.ops.aten


def any_partial(inputs: int, outputs: int, ops: Sequence[str] = REDUCE_OPS) -> list[Row]:
    """Partial values stay partial: operators that only move elements commute with every reduction."""
    found: list[Partial] = [*map(P, ops), *([ANY_NORM] if ops is REDUCE_OPS else [])]
    return [Row((partial,) * inputs, (partial,) * outputs) for partial in found]


def kept_dims(pairs: Iterable[tuple[int, int]], outputs: int = 1) -> list[Row]:
    """One row per pair (input dim, output dim) that are cut alike; every output has the same dims."""
    return [Row((S(i),), (S(o),) * outputs) for i, o in pairs]


def rearrangement(
    rows: Callable[[OpCall], list[Row]], local: Callable[[LocalCall], LocalFunction | None] | None
) -> Rule:
    """The rule of an operator that moves elements of one tensor, changes none and keeps the order within cut dims."""
    return Rule(lambda call: rows(call) + any_partial(1, len(call.outputs)), local, unordered=True)


# --- reshapes -------------------------------------------------------------------------------------------------------


def reshape_rows(call: OpCall) -> list[Row]:
    """Rows of any operator that keeps the row-major order of elements, from its global shapes."""
    moves = reshape_moves(call.tensors[0].shape, call.outputs[0].shape)
    return [Row((S(m.source, m.unit, m.runs),), (S(m.target, m.steps, m.target_runs),)) for m in moves]


def reshape_local(call: LocalCall) -> LocalFunction:
    """Tensor methods, which cost less than the overloads."""
    shape = call.outputs[0].local_shape
    if call.call.op is aten._unsafe_view.default:
        return lambda x, size: x.reshape(shape)
    return lambda x, *args: x.view(shape)


def _squeezed(call: OpCall) -> list[int]:
    """The dims that go: of those asked for, the ones that are 1 globally; locally others may be."""
    (source,) = call.tensors
    if "dim" in call.bound and call["dim"] in ((), []):
        return []  # an empty list asks for none, where reductions take it for all
    asked = call.dims() if "dim" in call.bound else tuple(range(source.ndim))
    return [d for d in asked if source.ndim and source.shape[d] == 1]


def squeeze_rows(call: OpCall) -> list[Row]:
    """A dim that goes lies with one coordinate, which then holds everything: any other dim can say so."""
    gone, ndim = _squeezed(call), call.tensors[0].ndim
    kept = [d for d in range(ndim) if d not in gone]
    left = call.outputs[0].shape
    return kept_dims((d, i) for i, d in enumerate(kept)) + [
        Row((S(d),), (S(o, n),)) for d in gone for o, n in enumerate(left) if n
    ]


def squeeze_local(call: LocalCall) -> LocalFunction | None:
    source, shape, dims = call.inputs[0], call.outputs[0].local_shape, tuple(_squeezed(call.call))
    if all(source.local_shape[d] == 1 for d in dims):
        return lambda x, *args: x.squeeze(dims)
    return lambda x, *args: x.new_empty(shape)


def unsqueeze_rows(call: OpCall) -> list[Row]:
    ndim = call.tensors[0].ndim
    dim = int(call["dim"]) % (ndim + 1)
    return kept_dims((d, d + (d >= dim)) for d in range(ndim))


def view_dtype_rows(call: OpCall) -> list[Row]:
    """A wider type takes several elements of the last dim for one, a narrower one makes several of one."""
    (source,), (target,) = call.tensors, call.outputs
    rows = kept_dims((d, d) for d in range(source.ndim - 1))
    if source.ndim:
        last, n, m = source.ndim - 1, source.shape[-1], target.shape[-1]
        steps = max(1, min(n, m))
        rows.append(Row((S(last, max(1, n // steps)),), (S(last, max(1, m // steps)),)))
    return rows


# --- permutations ---------------------------------------------------------------------------------------------------


def permute_rows(call: OpCall) -> list[Row]:
    ndim = call.tensors[0].ndim
    return kept_dims((int(dim) % ndim, i) for i, dim in enumerate(call["dims"]))


def transpose_rows(call: OpCall) -> list[Row]:
    ndim = call.tensors[0].ndim
    swap = dict(zip(pair := (call.dim("dim0"), call.dim("dim1")), reversed(pair), strict=True))
    return kept_dims((d, swap.get(d, d)) for d in range(ndim))


def t_rows(call: OpCall) -> list[Row]:
    ndim = call.tensors[0].ndim
    return kept_dims((d, ndim - 1 - d) for d in range(ndim))


def same_rows(call: OpCall) -> list[Row]:
    return kept_dims((d, d) for d in range(call.tensors[0].ndim))


# --- broadcasts, windows ----------------------------------------------------------------------------------------------


def expand_rows(call: OpCall) -> list[Row]:
    (source,), (target,) = call.tensors, call.outputs
    new = target.ndim - source.ndim
    return kept_dims((d, d + new) for d in range(source.ndim) if source.shape[d] == target.shape[d + new])


def expand_local(call: LocalCall) -> LocalFunction:
    shape = call.outputs[0].local_shape
    return lambda x, size, **kwargs: x.expand(shape)


def unfold_rows(call: OpCall) -> list[Row]:
    """Windows that do not overlap and leave nothing over are a split; others need their neighbours' elements."""
    (source,) = call.tensors
    if not source.ndim:
        return []
    dim, size, step = call.dim("dimension"), call["size"], call["step"]
    rows = kept_dims((d, d) for d in range(source.ndim) if d != dim)
    if size <= step and source.shape[dim] % step == 0:
        rows.append(Row((S(dim, step),), (S(dim),)))
    return rows


def unfold_local(call: LocalCall) -> LocalFunction | None:
    """A piece without windows is too short for `unfold`."""
    dim, shape = call.call.dim("dimension") if call.inputs[0].ndim else None, call.outputs[0].local_shape
    return None if dim is None or shape[dim] else lambda x, *args: x.new_empty(shape)


def view_as_real_rows(call: OpCall) -> list[Row]:
    return same_rows(call) + linear_rows((0,), 1, 1)


def view_as_complex_rows(call: OpCall) -> list[Row]:
    return kept_dims((d, d) for d in range(call.tensors[0].ndim - 1)) + linear_rows((0,), 1, 1)


# --- gradients of views -----------------------------------------------------------------------------------------------


def with_input_sizes(call: LocalCall) -> LocalFunction:
    """The gradient of a view, whose operator is told the sizes of its input: this rank's."""
    op, shape = call.call.op, call.outputs[0].local_shape
    if 0 in call.inputs[0].local_shape:
        return lambda grad, *args: grad.new_zeros(shape)

    def run(grad: Tensor, input_sizes: Sequence[int], *args: Any) -> Any:
        return op(grad, shape, *args)

    return run


def unfold_backward_rows(call: OpCall) -> list[Row]:
    sizes = call["input_sizes"]
    if not sizes:
        return linear_rows((0,), 1, 1)
    dim, size, step = int(call["dim"]) % len(sizes), call["size"], call["step"]
    rows = kept_dims((d, d) for d in range(len(sizes)) if d != dim)
    if size <= step and sizes[dim] % step == 0:
        rows.append(Row((S(dim),), (S(dim, step),)))
    return rows + linear_rows((0,), 1, 1)


RESHAPE = rearrangement(reshape_rows, reshape_local)
SQUEEZE = rearrangement(squeeze_rows, squeeze_local)

VIEW: Table = {
    aten.view.default: RESHAPE,
    aten._unsafe_view.default: RESHAPE,
    aten._reshape_alias.default: RESHAPE,
    aten.unsqueeze.default: rearrangement(unsqueeze_rows, None),
    aten.squeeze.default: SQUEEZE,
    aten.squeeze.dim: SQUEEZE,
    aten.squeeze.dims: SQUEEZE,
    aten.view.dtype: Rule(view_dtype_rows),
    aten.permute.default: rearrangement(permute_rows, None),
    aten.transpose.int: rearrangement(transpose_rows, None),
    aten.t.default: rearrangement(t_rows, None),
    aten.expand.default: rearrangement(expand_rows, expand_local),
    aten.unfold.default: rearrangement(unfold_rows, unfold_local),
    aten.view_as_real.default: Rule(view_as_real_rows),
    aten.view_as_complex.default: Rule(view_as_complex_rows),
    # Strides are about one storage, which no rank has: gathered, and so no view of its input.
    aten.as_strided.default: Rule(lambda call: any_partial(1, 1)),
    aten.as_strided_scatter.default: Rule(lambda call: any_partial(2, 1)),
    aten.unfold_backward.default: Rule(unfold_backward_rows, with_input_sizes),
}
