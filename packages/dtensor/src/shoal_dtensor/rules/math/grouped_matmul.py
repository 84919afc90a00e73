"""Sharding of products of groups of matrices, such as the tokens and weights of experts.

One dim of an operand may be divided into groups by `offs`, the ends of the groups. Such a dim may
be sharded too: each rank moves the ends into its shard, and groups of other ranks become empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional

from ..language.notation import product
from ..language.rule import LocalCall, LocalFunction, OpCall, Row, Rule, Table, family

# The patterns by the numbers of dims of both operands. The groups are g; the dim that is divided
# into groups is t.
_PATTERNS = {
    (2, 3): "t k, g k n, g -> t n",
    (3, 2): "g m k, k t, g -> m t",
    (2, 2): "m t, t n, g -> g m n",
    (3, 3): "g m k, g k n -> g m n",
}
# The position of the operand with the dim that is divided into groups, and this dim.
_DIVIDED = {(2, 3): (0, 0), (3, 2): (1, 1), (2, 2): (0, 1)}
# Kernels refuse rows (or columns) that do not begin at multiples of 16 bytes.
_ALIGNMENT = 16


def grouped_mm(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `_grouped_mm`; none with a bias, which torch's kernels refuse."""
    if call["bias"] is not None:
        return
    # Every rank needs the ends of all groups.
    rule = product(
        _PATTERNS[_ndims(call)], linear=(0, 1), replicated="" if _is_batch(call) else "g"
    )
    yield from rule.rows(call)


def _ndims(call: OpCall) -> tuple[int, int]:
    return call["self"].ndim, call["mat2"].ndim


def _is_batch(call: OpCall) -> bool:
    """Tell whether each group is a matrix of its own in both operands."""
    return _ndims(call) == (3, 3)


def _grouped_mm(local_call: LocalCall) -> LocalFunction | None:
    """Multiply shards, with the ends of groups moved into this shard and aligned rows."""
    call = local_call.call
    operands = [local_call[name] for name in ("self", "mat2")]
    output = local_call.outputs[0]
    step = _ALIGNMENT // operands[0].dtype.itemsize
    sizes = [size for spec in operands for size in spec.local_shape[-2:]]
    is_aligned = all(size % step == 0 for size in sizes)
    start, length = _range_of_groups(local_call)
    is_whole = call["offs"] is None or length == _length_of_groups(call)
    if is_aligned and is_whole:
        return None
    op = call.op

    def run(a: Tensor, b: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if offs is not None:
            offs = (offs - start).clamp(0, length)
        result: Tensor = op(_pad_matrices(a, step), _pad_matrices(b, step), offs, *args, **kwargs)
        rows, columns = output.local_shape[-2:]
        return result[..., :rows, :columns].contiguous()

    return run


def _length_of_groups(call: OpCall) -> int:
    """Return the global size of the dim that is divided into groups."""
    operand, dim = _DIVIDED[_ndims(call)]
    return call.tensors[operand].shape[dim]


def _range_of_groups(local_call: LocalCall) -> tuple[int, int]:
    """Return where this shard of the dim that is divided into groups begins, and its size."""
    place = _DIVIDED.get(_ndims(local_call.call))
    if place is None:
        return 0, 0
    operand, dim = place
    spec = local_call.inputs[operand]
    return spec.offset(dim), spec.local_shape[dim]


def _pad_matrices(matrices: Tensor, step: int) -> Tensor:
    """Return matrices with zeros behind, so that both of their dims are multiples of `step`."""
    rows, columns = (-size % step for size in matrices.shape[-2:])
    return functional.pad(matrices, (0, columns, 0, rows)) if rows or columns else matrices


GROUPED_MATMUL: Table = family({"_grouped_mm": Rule(grouped_mm, _grouped_mm, skip_empty=True)})
