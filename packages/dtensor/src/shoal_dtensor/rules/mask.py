"""Sharding of masked reading and writing in order: masked_select, `x[mask]`, masked_scatter.

What a mask selects is as long as the data say, so it is gathered on every rank, in global order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .found import few, ordered, with_offset
from .local import cutting
from .rule import LocalCall, LocalFunction, OpCall, R, Row, Rule, S, Table
from .table import family

__all__ = ["MASK"]

aten = torch.ops.aten


def _select_rows(call: OpCall) -> list[Row]:
    source, mask = call.tensors
    if source.shape != mask.shape:
        return []
    return [Row((S(d), S(d)), (R,), traffic=few(call)) for d in range(source.ndim)]


def _select_local(decided: LocalCall) -> LocalFunction | None:
    spec, axes = decided.inputs[0], cutting(decided.inputs[0])
    if not axes:
        return None

    def run(x: Tensor, mask: Tensor) -> Tensor:
        return ordered(spec, axes, with_offset(spec, mask.nonzero()), x[mask])[1]

    return run


def _scatter_rows(call: OpCall) -> list[Row]:
    """The target is broadcast to the mask's shape; what is cut, is cut after that."""
    (made,), target = call.outputs, call.tensors[0]
    new = made.ndim - target.ndim
    kept = [d for d, n in enumerate(target.shape) if n == made.shape[d + new]]
    return [Row((S(d), R, R), (S(d + new),)) for d in kept]


def _scatter_local(decided: LocalCall) -> LocalFunction | None:
    """How many elements a mask took before this piece, everyone counts on the whole mask."""
    call, spec = decided.call, decided.outputs[0]
    if not cutting(spec):
        return None
    written = bool(call.written)

    def run(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        whole = mask.expand(spec.shape)
        taken = (whole.reshape(-1).cumsum(0) - 1).view(spec.shape)
        for d, (start, held) in enumerate(zip(spec.local_offset, spec.local_shape, strict=True)):
            whole, taken = whole.narrow(d, start, held), taken.narrow(d, start, held)
        result = x if written else x.expand(spec.local_shape).clone()
        result[whole] = source.reshape(-1)[taken[whole]]
        return result

    return run


MASK: Table = {aten.masked_select.default: Rule(_select_rows, _select_local, dynamic=True)} | family(
    {
        "masked_scatter.default masked_scatter_.default": Rule(_scatter_rows, _scatter_local),
        "masked_scatter_backward.default": Rule(lambda call: []),
    }
)
