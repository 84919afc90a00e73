"""Sharding of the triangular parts of matrices: any dim may be cut, the diagonal moves with the piece."""

from __future__ import annotations

from .local import replacing
from .notation import linear_rows
from .rule import LocalCall, LocalFunction, OpCall, Row, Rule, Table
from .table import family
from .view import kept_dims

__all__ = ["TRIANGLE"]


def _rows(call: OpCall) -> list[Row]:
    return kept_dims((d, d) for d in range(call.tensors[0].ndim)) + linear_rows((0,), 1, 1)


def _local(decided: LocalCall) -> LocalFunction | None:
    row, column = decided.inputs[0].local_offset[-2:]
    return None if row == column else replacing(decided.call, diagonal=decided.call["diagonal"] + row - column)


TRIANGLE: Table = family({"tril triu": Rule(_rows, _local)})
