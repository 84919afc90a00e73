"""Sharding of linear algebra: products, distances, factorizations, solvers, Fourier transforms.

A factor in both inputs and the output of a product shards all three; a factor only in the inputs is
summed: partial output. An added matrix (`addmm`) must then be a partial sum too, so that it is
counted once. For factorizations, batch dims may be sharded; for transforms, the dims that are not
transformed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal_mesh.internal import bound

from ..._torch.tensors import with_conjugates
from ...layout.spec import Spec
from ..language.local_ops import in_every_form, where_sharded
from ..language.notation import Pattern, alike, factor_rows, parse, product
from ..language.rule import (
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
    Rule,
    S,
    Table,
    family,
    replicated,
)


def _added(text: str, name: str = "self") -> Rule:
    """Return the rule of `beta * c + alpha * (product)`.

    `c` is the argument `name`, which has the last dims of the output.
    """

    def rows(call: OpCall) -> Iterator[Row]:
        pattern = parse(text)
        (index,) = call.places[name]
        (result,) = pattern.outputs
        dims = result[len(result) - call[name].ndim :]  # a vector added to "m n": "n"
        inputs = (*pattern.inputs[:index], dims, *pattern.inputs[index:])
        for row in factor_rows(Pattern(text, inputs, pattern.outputs), call.tensors, call.outputs):
            added = (P("sum"),) if row.outputs[0] == P("sum") else row.inputs[index : index + 1]
            yield replace(row, inputs=(*row.inputs[:index], *added, *row.inputs[index + 1 :]))
        # Linear in the added operand together with any one factor; an average may also meet a fixed
        # added operand.
        for factor in (
            operand for operand, place in call.places.items() if place and operand != name
        ):
            yield from call.keeping_partials(name, factor, ops=("sum", "avg"))
            yield from call.keeping_partials(factor, ops=("avg",))
        yield from call.keeping_partials(name, ops=("avg",))

    return Rule(rows, _added_alone, sizes=())


def _added_alone(local_call: LocalCall) -> LocalFunction | None:
    """Return only the added operand on a rank without elements of a factor.

    Kernels differ in the shape that they return for empty factors.
    """
    spec, empty = (
        local_call.outputs[0],
        any(0 in spec.local_shape for spec in local_call.inputs[1:]),
    )
    if not empty or (local_call.call.written and 0 not in spec.local_shape):
        return None
    beta: float = local_call.call["beta"]

    def run(added: Tensor, first: Tensor, second: Tensor, *_: Any, **__: Any) -> Tensor:
        return bound((added * beta).to(spec.dtype).expand(spec.local_shape).clone(), first, second)

    return in_every_form(local_call.call, run)


_WITH_BIAS = _added("... k, n k -> ... n", "bias")


def linear(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `x @ w.T + b`."""
    vector = call["weight"].ndim == 1
    if call["bias"] is not None and not vector:
        yield from _WITH_BIAS.rows(call)
    else:
        yield from product(
            "... k, k -> ..." if vector else "... k, n k -> ... n", linear=(0, 1)
        ).rows(call)


def matmul(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `a @ b` for any numbers of dims; a vector is a matrix without one dim."""
    a, b = call.tensors
    left = "k" if a.ndim == 1 else "m k" if a.ndim == 2 else "... m k"
    right = "k" if b.ndim == 1 else "k n" if b.ndim == 2 else "... k n"
    batch = "... " if max(a.ndim, b.ndim) > 2 else ""
    # 2 and 3 dims: "... m n"
    result = f"{batch}{'m ' if a.ndim > 1 else ''}{'n' if b.ndim > 1 else ''}"
    yield from product(f"{left}, {right} -> {result}", linear=(0, 1)).rows(call)


def kron(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `kron`, which merges dims pairwise from the right.

    An operand with fewer dims lacks dims on the left.
    """
    ndims = [tensor.ndim for tensor in call.tensors]
    places = range(max(ndims))
    first, second = (
        [f"{name}{i}" if i >= max(ndims) - n else "" for i in places]
        for name, n in zip("ab", ndims, strict=True)
    )
    # 1 and 2 dims: "( b0) (a1 b1)"
    result = " ".join(f"({a} {b})" for a, b in zip(first, second, strict=True))
    yield from product(f"{' '.join(first)}, {' '.join(second)} -> {result}", linear=(0, 1)).rows(
        call
    )


def batched(call: OpCall) -> Iterator[Row]:
    """Yield rows for leading dims that all operands share; the last two dims are matrices."""
    # An operand whose batch dim is broadcast (size 1) gives no row; one without batch dims (pivots)
    # is replicated.
    main = max(call.tensors, key=lambda t: t.ndim)
    for d, n in enumerate(main.shape[:-2]):
        batches = [t.ndim > d and t.shape[d] == n for t in (*call.tensors, *call.outputs)]
        pivots = [t.ndim <= 1 for t in call.tensors] + [False] * len(call.outputs)
        if all(batch or pivot for batch, pivot in zip(batches, pivots, strict=True)):
            entries = [S(d) if batch else R for batch in batches]
            yield Row(tuple(entries[: len(call.tensors)]), tuple(entries[len(call.tensors) :]))


@where_sharded
def _trace(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    """Sum over shards the part of the global diagonal that crosses each shard."""
    # rows 2:4 of (4, 4): 2 and 0, so the shard's (0, 2) and (1, 3)
    row, column = spec.local_offset
    return lambda matrix, *_, **__: matrix.diagonal(row - column).sum()


def linalg_cross(call: OpCall) -> Iterator[Row]:
    """Yield elementwise rows, except for the dim of three."""
    dim = call.dim("dim", 0 if call["self"].ndim >= call["other"].ndim else 1)
    elementwise = product("..., ... -> ...", linear=(0, 1))
    yield from (row for row in elementwise.rows(call) if row.outputs[0] != S(dim))


def trilinear(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `_trilinear`, whose operands lack the dims that they are expanded by.

    Some dims of the product are summed.
    """
    dims = range(call["i1"].ndim + len(call["expand1"]))
    gone = ("expand1", "expand2", "expand3", "sumdim")
    i1, i2, i3, out = (" ".join(f"d{d}" for d in dims if d not in call[name]) for name in gone)
    # by 1, of 3: "d0 d2"
    yield from product(f"{i1}, {i2}, {i3} -> {out}", linear=(0, 1, 2)).rows(call)


_BATCHED = Rule(batched, unordered=True, skip_empty=True)


MATMUL: Table = family(
    {
        "mm": product("m k, k n -> m n", linear=(0, 1)),
        "bmm": product("b m k, b k n -> b m n", linear=(0, 1)),
        "mv": product("m k, k -> m", linear=(0, 1)),
        "dot vdot": product("k, k -> ", linear=(0, 1)),
        "ger outer": product("m, n -> m n", linear=(0, 1)),
        "kron": Rule(kron),
        "matmul": Rule(matmul, sizes=()),
        "linear": Rule(linear, sizes=()),
        "addmm": _added("m k, k n -> m n"),
        "addmv": _added("m k, k -> m"),
        "addr": _added("m, n -> m n"),
        "baddbmm": _added("b m k, b k n -> b m n"),
        "addbmm": _added("b m k, b k n -> m n"),
        # Distances between rows; torch's kernel of the gradient leaves out a batch that both sides
        # share.
        "_cdist_forward _euclidean_dist": product(
            "... p m, ... r m -> ... p r", replicated="m", skip_empty=True
        ),
        "_cdist_backward": product(
            "... p r, ... p m, ... r m, ... p r -> ... p m", linear=(0,), skip_empty=True
        ),
    },
    unordered=True,
) | family(
    {
        "cholesky cholesky_inverse cholesky_solve linalg_cholesky_ex": _BATCHED,
        "_linalg_det _linalg_slogdet _linalg_eigh _linalg_eigvals _linalg_svd _linalg_solve_ex": _BATCHED,
        "linalg_eig linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu": _BATCHED,
        "linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr linalg_solve_triangular lu_unpack": _BATCHED,
        "linalg_householder_product geqrf ormqr triangular_solve": _BATCHED,
        # every rank sees all matrices, so all raise alike
        "_linalg_check_errors": Rule(replicated),
        # Its kernel is made of other operators, which look at conjugate marks.
        "linalg_pinv.atol_rtol_tensor": Rule(
            batched, lambda local_call: with_conjugates(local_call.call.op), skip_empty=True
        ),
        "linalg_cross": Rule(linalg_cross),
        "trace": product("m n -> ", linear=(0,), local=_trace),
        "_trilinear": Rule(trilinear),
        "_fft_c2c _fft_r2c _fft_c2r": Rule(
            lambda call: alike(call, *call.dims()), skip_empty=True, linear="self"
        ),
    }
)
