"""Sharding of products of small numbers with scales, such as float8.

Operands are sharded like the operands of a plain product. A scale of a row, a column or a block is
sharded with its numbers; a scale of a whole operand is replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor

from ...layout.tensor_meta import TensorMeta, flatten
from ..language.rule import (
    Entry,
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
    Rule,
    S,
    Table,
    contribution,
    family,
    in_every_form,
)

# Kernels refuse contracted dims and columns whose sizes are not multiples of this number.
_MULTIPLE = 16
# A scale with one dim stores the scales of this number of rows next to each other.
_ROWS_OF_LIST = 128


@dataclass(frozen=True, slots=True)
class _Operand:
    """One operand of a product and its scales.

    Attributes:
        meta: the matrix.
        scales: its scales, which multiply one another.
        outer: the dim of the matrix that is not contracted.
        has_outer_scales: whether each step along `outer` has a scale of its own.
    """

    meta: TensorMeta
    scales: Sequence[TensorMeta]
    outer: int
    has_outer_scales: bool

    def unit(self, dim: int) -> int | None:
        """Return the multiples of elements at which `dim` may be sharded; None if it may not be."""
        unit = 1
        for scale in self.scales:
            elements = self._elements_of(scale, dim)
            if elements is None:
                return None
            unit = lcm(unit, elements)
        return unit

    def entries(self, dim: int, unit: int) -> list[Entry]:
        """Return the entries of the scales where `dim` is sharded at multiples of `unit`."""
        return [self._entry(scale, dim, unit) for scale in self.scales]

    def _elements_of(self, scale: TensorMeta, dim: int) -> int | None:
        """Return the number of elements along `dim` whose scales cannot be separated."""
        size = self.meta.shape[dim]
        if self._covers_all(scale, dim):
            return 1
        if scale.ndim == 1:
            is_list_of_rows = dim == self.outer and size % _ROWS_OF_LIST == 0
            return _ROWS_OF_LIST if is_list_of_rows else None
        # Scales of other dtypes are stored in the order of tensor cores, not by rows and columns.
        is_in_order = scale.dtype == torch.float32
        count = scale.shape[dim]
        has_whole_blocks = count > 0 and size % count == 0
        return size // count if is_in_order and has_whole_blocks else None

    def _entry(self, scale: TensorMeta, dim: int, unit: int) -> Entry:
        """Return the entry of a scale where `dim` is sharded at multiples of `unit`."""
        if self._covers_all(scale, dim):
            return R
        scale_dim = 0 if scale.ndim == 1 else dim
        # Example: 256 rows are sharded at multiples of 128, and have 2 scales for blocks of 128
        # rows. The scales are sharded at multiples of 1.
        return S(scale_dim, unit * scale.shape[scale_dim] // self.meta.shape[dim])

    def _covers_all(self, scale: TensorMeta, dim: int) -> bool:
        """Tell whether a scale does not vary along `dim`."""
        if self.has_outer_scales and dim == self.outer:
            return False
        return prod(scale.shape) == 1 or (scale.ndim == 2 and scale.shape[dim] == 1)


def _operands(call: OpCall) -> tuple[_Operand, _Operand]:
    """Return both operands of a call."""
    scales_a, scales_b = [[*flatten(call[name])] for name in ("scale_a", "scale_b")]
    # A scale of shape (1, 1) belongs to a row if the other operand has scales of columns.
    shapes_a = [tuple(scale.shape) for scale in scales_a]
    shapes_b = [tuple(scale.shape) for scale in scales_b]
    has_vectors = any(len(shape) == 2 and prod(shape) > 1 for shape in (*shapes_a, *shapes_b))
    rows, _ = call["self"].shape
    _, columns = call["mat2"].shape
    by_row = has_vectors and shapes_a == [(rows, 1)]
    by_column = has_vectors and shapes_b == [(1, columns)]
    first = _Operand(call["self"], scales_a, outer=0, has_outer_scales=by_row)
    return first, _Operand(call["mat2"], scales_b, outer=1, has_outer_scales=by_column)


def scaled_mm(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `(scale_a * self) @ (scale_b * mat2) + bias`."""
    # An empty list stands for the usual dims; other dims are not supported.
    if call.get("contraction_dim"):
        return
    first, second = _operands(call)
    yield from _by_rows(call, first)
    yield from _by_columns(call, second)
    yield from _by_contracted_dim(call, first, second)


def _by_rows(call: OpCall, first: _Operand) -> Iterator[Row]:
    """Yield the row that shards the rows of the first operand."""
    unit = first.unit(0)
    if unit is not None:
        rows = S(0, unit)
        yield call.row(
            self=rows, scale_a=_entries_for(call, "scale_a", first.entries(0, unit)), out=rows
        )


def _by_columns(call: OpCall, second: _Operand) -> Iterator[Row]:
    """Yield the row that shards the columns of the second operand."""
    unit_of_scales = second.unit(1)
    if unit_of_scales is None:
        return
    unit = lcm(unit_of_scales, _MULTIPLE)
    columns = S(1, unit)
    scales = _entries_for(call, "scale_b", second.entries(1, unit))
    yield call.row(mat2=columns, scale_b=scales, bias=S(0, unit), out=columns)


def _by_contracted_dim(call: OpCall, first: _Operand, second: _Operand) -> Iterator[Row]:
    """Yield the row that shards the contracted dim, so that the result is a partial sum."""
    first_unit = first.unit(1)
    second_unit = second.unit(0)
    if first_unit is None or second_unit is None:
        return
    unit = lcm(first_unit, second_unit, _MULTIPLE)
    scales = {
        "scale_a": _entries_for(call, "scale_a", first.entries(1, unit)),
        "scale_b": _entries_for(call, "scale_b", second.entries(0, unit)),
    }
    # The bias is a partial sum too, so that it is counted once.
    bias = P("sum")
    yield call.row(scales, self=S(1, unit), mat2=S(0, unit), bias=bias, out=P("sum"))


def _entries_for(call: OpCall, name: str, entries: list[Entry]) -> Entry | list[Entry]:
    """Return the entries of an argument: one for a tensor, a list for a list of tensors."""
    return entries[0] if isinstance(call[name], TensorMeta) else entries


def _scaled_mm(local_call: LocalCall) -> LocalFunction | None:
    """Run the operator itself, except on a rank without elements of an operand.

    Such a rank has no elements of the result, or adds only its partial bias.
    """
    call = local_call.call
    result = local_call.outputs[0]
    if 0 in result.local_shape:
        return contribution(local_call)
    if 0 not in local_call["self"].local_shape:
        return None
    names = call.schema.inputs
    has_bias = call["bias"] is not None

    def add_bias(*args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if not has_bias:
            zeros: Tensor = arguments["self"].new_zeros(result.local_shape, dtype=result.dtype)
            return zeros
        bias: Tensor = arguments["bias"].to(result.dtype)
        return bias.expand(result.local_shape).clone()

    return in_every_form(call, add_bias)


SCALED_MATMUL: Table = family(
    {"_scaled_mm _scaled_mm_v2": Rule(scaled_mm, _scaled_mm, unordered=True)}
)
