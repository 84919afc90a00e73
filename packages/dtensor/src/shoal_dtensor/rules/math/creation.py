"""Sharding of operators that make a tensor like another: they read its shape and dtype, never its values."""

from __future__ import annotations

from collections.abc import Iterator

from ...layout.placements import REDUCE_OPS
from ..language.local_ops import with_arguments
from ..language.notation import pointwise
from ..language.rule import ANY_NORM, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from ..language.rule_tables import family


def zeros_like(call: OpCall) -> Iterator[Row]:
    """Sharded like the original; new where the original is partial."""
    yield from pointwise().rows(call)
    yield from _of_partials(call)


def new_zeros(call: OpCall) -> Iterator[Row]:
    """A new size: sharded like the original along dims that are as long as in the original, else replicated."""
    source, result = call["self"], call.outputs[0]
    yield from _of_partials(call)
    for d in range(source.ndim):
        alike = source.ndim == result.ndim and source.shape[d] == result.shape[d]
        yield call.row(self=S(d), out=S(d) if alike else R)


def _of_partials(call: OpCall) -> Iterator[Row]:
    yield from (call.row(self=partial) for partial in (*map(P, REDUCE_OPS), ANY_NORM))


def _local_size(local_call: LocalCall) -> LocalFunction | None:
    """This rank's size, and where a stride is asked for, strided in the global order of dims."""
    (spec,), call = local_call.outputs, local_call.call
    stride = {"stride": spec.local_stride} if "stride" in call.bound else {}
    return None if spec.local_shape == spec.shape else with_arguments(call, size=list(spec.local_shape), **stride)


CREATION: Table = family(
    {
        "zeros_like ones_like empty_like full_like": Rule(zeros_like, by_value=False, unordered=True, sizes=()),
        "new_zeros new_ones new_empty new_empty_strided new_full": Rule(new_zeros, _local_size),
    }
)
