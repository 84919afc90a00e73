"""Sharding of dense linear algebra (factorisations, solvers, functions of matrices): by batch, matrices whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._torch import with_conjugates
from ..spec import TensorMeta
from .local import cutting, or_empty
from .notation import product
from .rule import LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["MATRIX"]


def _batches(call: OpCall) -> list[Row]:
    """Rows for leading dims that all operands share; the last two dims of the inputs are matrices.

    Of an operand whose batch is broadcast (size 1) every rank takes the whole.
    """
    main = max(call.tensors, key=lambda t: t.ndim)
    rows = []
    for d in range(main.ndim - 2):
        inputs = [_batch(t, d, main.shape[d]) or (R if t.ndim <= 1 else None) for t in call.tensors]
        outputs = [_batch(t, d, main.shape[d]) for t in call.outputs]
        if None not in inputs and None not in outputs:
            rows.append(Row(tuple(e for e in inputs if e), tuple(e for e in outputs if e)))
    return rows


def _batch(tensor: TensorMeta, dim: int, size: int) -> S | None:
    return S(dim) if tensor.ndim > dim and tensor.shape[dim] == size else None


def _trace(call: OpCall) -> list[Row]:
    return [Row((S(0),), (P("sum"),)), Row((S(1),), (P("sum"),)), *(Row((P(o),), (P(o),)) for o in ("sum", "avg"))]


def _local_trace(decided: LocalCall) -> LocalFunction | None:
    """The part of the diagonal that crosses this rank's box."""
    spec = decided.inputs[0]
    if not cutting(spec):
        return None
    row, column = spec.local_offset

    def run(matrix: Tensor, *_: Any, **__: Any) -> Tensor:
        offset = row - column
        if not matrix.numel() or offset >= matrix.shape[1] or -offset >= matrix.shape[0]:
            return matrix.new_zeros((), dtype=decided.outputs[0].dtype)
        return matrix.diagonal(offset).sum()

    return run


def _cross(call: OpCall) -> list[Row]:
    """`linalg.cross`: elementwise but for its dim of three."""
    rows = product("..., ... -> ...", linear=(0, 1)).rows(call)
    dim = call.dim("dim", 0 if call.tensors[0].ndim >= call.tensors[1].ndim else 1)
    return [row for row in rows if row.outputs[0] != S(dim)]


def _trilinear(call: OpCall) -> list[Row]:
    """`_trilinear`: each operand lacks the dims that it is expanded by; some dims of the product are summed."""
    expands = [call["expand1"], call["expand2"], call["expand3"]]
    summed, rows = call["sumdim"], []
    for d in range(call.tensors[0].ndim + len(expands[0])):
        inputs = [R if d in expand else S(d - sum(e < d for e in expand)) for expand in expands]
        made = P("sum") if d in summed else S(d - sum(s < d for s in summed))
        rows.append(Row(tuple(inputs), (made,)))
    linear = [Row(tuple(P(o) if j == i else R for j in range(3)), (P(o),)) for i in range(3) for o in ("sum", "avg")]
    return rows + linear


def _composed(decided: LocalCall) -> LocalFunction:
    """A kernel that is made of other operators."""
    return or_empty(decided) or with_conjugates(decided.call.op)


_BATCH = Rule(_batches, or_empty, unordered=True)

MATRIX: Table = family(
    {
        "cholesky cholesky_inverse cholesky_solve linalg_cholesky_ex": _BATCH,
        "_linalg_det _linalg_slogdet _linalg_eigh _linalg_eigvals _linalg_svd _linalg_solve_ex": _BATCH,
        "linalg_eig linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu": _BATCH,
        "linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr linalg_solve_triangular lu_unpack": _BATCH,
        "linalg_householder_product geqrf ormqr triangular_solve": _BATCH,
        "linalg_pinv.atol_rtol_tensor": Rule(_batches, _composed),
        "linalg_cross": Rule(_cross),
        "trace": Rule(_trace, _local_trace),
        "_trilinear": Rule(_trilinear),
    }
)
