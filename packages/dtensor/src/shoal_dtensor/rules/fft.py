"""Sharding of Fourier transforms, on one mesh axis: dims that are not transformed are free."""

from __future__ import annotations

from .local import or_empty
from .notation import linear_rows
from .rule import OpCall, Row, Rule, S, Table
from .table import family

__all__ = ["FFT"]


def _rows(call: OpCall) -> list[Row]:
    dims = call.dims()
    rows = [Row((S(d),), (S(d),)) for d in range(call.tensors[0].ndim) if d not in dims]
    return rows + linear_rows((0,), 1, 1)


FFT: Table = family({"_fft_c2c _fft_r2c _fft_c2r": Rule(_rows, or_empty)})
