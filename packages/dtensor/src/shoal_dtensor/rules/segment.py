"""Sharding of reductions over segments of one dim, on one mesh axis: the dims behind that one are free."""

from __future__ import annotations

from ..spec import TensorMeta
from .local import or_empty
from .rule import OpCall, R, Row, Rule, S, Table
from .table import family

__all__ = ["SEGMENT"]

VALUES = ("grad", "output", "data")


def _rows(call: OpCall) -> list[Row]:
    """The segments lie along `axis`, and lengths have the dims before it; those are read whole by the kernel."""
    names = [a.name for a in call.op._schema.arguments if isinstance(call.get(a.name), TensorMeta) and not a.is_out]
    first = int(call["axis"]) % call["data"].ndim + 1
    free = range(first, call["data"].ndim)
    return [Row(tuple(S(d) if n in VALUES else R for n in names), (S(d),)) for d in free]


SEGMENT: Table = family({"segment_reduce _segment_reduce_backward": Rule(_rows, or_empty)})
