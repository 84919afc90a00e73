"""Sharding of dense linear algebra (factorisations, solvers, functions of matrices) and of Fourier transforms.

Batch dims may be sharded, and so may the dims that are not transformed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..._torch import with_conjugates
from ...layout.tensor_meta import TensorMeta
from ..language.local_ops import sharding_axes
from ..language.notation import product
from ..language.rule import LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from ..language.rule_tables import family


def batched(call: OpCall) -> Iterator[Row]:
    """Rows for leading dims that all operands share; the last two dims of the inputs are matrices.

    An operand whose batch dim is broadcast (size 1) gives no row; one without batch dims (pivots) is replicated.
    """
    main = max(call.tensors, key=lambda t: t.ndim)
    for d in range(main.ndim - 2):
        inputs = [_batch(t, d, main.shape[d]) or (R if t.ndim <= 1 else None) for t in call.tensors]
        outputs = [_batch(t, d, main.shape[d]) for t in call.outputs]
        if None not in inputs and None not in outputs:
            yield Row(tuple(e for e in inputs if e), tuple(e for e in outputs if e))


def _batch(tensor: TensorMeta, dim: int, size: int) -> S | None:
    return S(dim) if tensor.ndim > dim and tensor.shape[dim] == size else None


def trace(call: OpCall) -> Iterator[Row]:
    yield from (call.row(self=S(d), out=P("sum")) for d in (0, 1))
    yield from call.linear("self")


def _trace(local_call: LocalCall) -> LocalFunction | None:
    """The trace is the sum over shards of the part of the diagonal that crosses them."""
    spec = local_call.inputs[0]
    if not sharding_axes(spec):
        return None
    row, column = spec.local_offset

    def run(matrix: Tensor, *_: Any, **__: Any) -> Tensor:
        offset = row - column
        if not matrix.numel() or offset >= matrix.shape[1] or -offset >= matrix.shape[0]:
            return matrix.new_zeros((), dtype=local_call.outputs[0].dtype)
        return matrix.diagonal(offset).sum()

    return run


def linalg_cross(call: OpCall) -> Iterator[Row]:
    """Elementwise but for its dim of three."""
    dim = call.dim("dim", 0 if call["self"].ndim >= call["other"].ndim else 1)
    yield from (row for row in _elementwise_product.rows(call) if row.outputs[0] != S(dim))


_elementwise_product = product("..., ... -> ...", linear=(0, 1))


def trilinear(call: OpCall) -> Iterator[Row]:
    """Each operand lacks the dims that it is expanded by; some dims of the product are summed."""
    expanded, summed = [call["expand1"], call["expand2"], call["expand3"]], call["sumdim"]
    for d in range(call["i1"].ndim + len(expanded[0])):
        i1, i2, i3 = (R if d in dims else S(d - sum(e < d for e in dims)) for dims in expanded)
        yield call.row(i1=i1, i2=i2, i3=i3, out=P("sum") if d in summed else S(d - sum(s < d for s in summed)))
    yield from call.linear("i1", "i2", "i3")


def fft(call: OpCall) -> Iterator[Row]:
    """Transformed dims are replicated."""
    dims = call.dims()
    yield from (call.row(self=S(d), out=S(d)) for d in range(call["self"].ndim) if d not in dims)
    yield from call.linear("self")


_BATCHED = Rule(batched, unordered=True, skip_empty=True)

LINALG: Table = family(
    {
        "cholesky cholesky_inverse cholesky_solve linalg_cholesky_ex": _BATCHED,
        "_linalg_det _linalg_slogdet _linalg_eigh _linalg_eigvals _linalg_svd _linalg_solve_ex": _BATCHED,
        "linalg_eig linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu": _BATCHED,
        "linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr linalg_solve_triangular lu_unpack": _BATCHED,
        "linalg_householder_product geqrf ormqr triangular_solve": _BATCHED,
        "_linalg_check_errors": Rule(lambda call: ()),  # every rank sees all matrices, so all raise alike
        # Its kernel is made of other operators, which look at conjugate marks.
        "linalg_pinv.atol_rtol_tensor": Rule(
            batched, lambda local_call: with_conjugates(local_call.call.op), skip_empty=True
        ),
        "linalg_cross": Rule(linalg_cross),
        "trace": Rule(trace, _trace),
        "_trilinear": Rule(trilinear),
        "_fft_c2c _fft_r2c _fft_c2r": Rule(fft, skip_empty=True),
    }
)
