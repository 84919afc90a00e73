"""Sharding of operators that make a tensor like another: they read its shape and type, never its values."""

from __future__ import annotations

from collections.abc import Sequence

from ..placements import REDUCE_OPS
from .local import replacing
from .notation import pointwise
from .rule import ANY_NORM, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["CREATE"]


def _like(call: OpCall) -> list[Row]:
    """Cut like the original; new whatever is still to be reduced in the original."""
    return [*pointwise().rows(call), *(Row((partial,), (R,)) for partial in (*map(P, REDUCE_OPS), ANY_NORM))]


def _new(call: OpCall) -> Sequence[Row]:
    """A new size: cut like the original along the dims that are as long as in the original, else whole."""
    (source,), (made,) = call.tensors, call.outputs
    rows = [Row((partial,), (R,)) for partial in (*map(P, REDUCE_OPS), ANY_NORM)]
    alike = [source.ndim == made.ndim and source.shape[d] == made.shape[d] for d in range(source.ndim)]
    return [*rows, *(Row((S(d),), (S(d) if alike[d] else R,)) for d in range(source.ndim))]


def _local_layout(decided: LocalCall) -> LocalFunction | None:
    """This rank's size, strided in the global order of dims."""
    (made,) = decided.outputs
    if made.local_shape == made.shape:
        return None
    stride, step = [0] * made.ndim, 1
    for dim in sorted(range(made.ndim), key=lambda d: (made.stride[d], -d)):
        stride[dim] = step
        step *= max(made.local_shape[dim], 1)
    return replacing(decided.call, size=list(made.local_shape), stride=stride)


def _local_size(decided: LocalCall) -> LocalFunction | None:
    (made,) = decided.outputs
    return None if made.local_shape == made.shape else replacing(decided.call, size=list(made.local_shape))


CREATE: Table = family(
    {
        "zeros_like ones_like empty_like": Rule(_like, by_value=False, unordered=True),
        "full_like": Rule(_like, by_value=False, unordered=True),
        "new_empty_strided": Rule(_new, _local_layout),
        "new_zeros new_ones new_empty new_full": Rule(_new, _local_size),
    }
)
