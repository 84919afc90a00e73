"""Sharding of linear algebra: products, distances, factorizations, solvers, Fourier transforms.

Sharding a factor of a product shards every operand that has the factor. If only the inputs have it,
it is summed, so the output is partial. An added matrix (`addmm`) must then be a partial sum too, so
that it is counted once. For factorizations, batch dims may be sharded; for transforms, the dims
that are not transformed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal_mesh.internal import with_dependence

from ..._torch.tensors import with_conjugates
from ...layout.spec import Spec
from ...layout.tensor_meta import TensorMeta
from ..language.local_ops import in_every_form, where_sharded
from ..language.notation import Pattern, factor_rows, parse, product, rows_sharded_alike
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
    family,
    no_rows,
)


def _rule_of_sum(text: str, name: str = "self") -> Rule:
    """Return the rule of `beta * c + alpha * (product)`.

    `c` is the argument `name`, which has the last dims of the output.
    """

    def rows(call: OpCall) -> Iterator[Row]:
        pattern = parse(text)
        (index,) = call.places[name]
        (result,) = pattern.outputs
        # Example: a vector that is added to "m n" has the dims "n".
        dims = result[len(result) - call[name].ndim :]
        inputs = (*pattern.inputs[:index], dims, *pattern.inputs[index:])
        with_added = Pattern(text, inputs, pattern.outputs)
        for row in factor_rows(with_added, call.tensors, call.outputs):
            if row.outputs[0] == P("sum"):
                entries = [*row.inputs]
                entries[index] = P("sum")
                row = replace(row, inputs=tuple(entries))
            yield row
        # The result is linear in the added operand together with any one factor. An average may
        # also be combined with a fixed added operand.
        factors = [operand for operand, place in call.places.items() if place and operand != name]
        for factor in factors:
            yield from call.keeping_partials(name, factor, ops=("sum", "avg"))
            yield from call.keeping_partials(factor, ops=("avg",))
        yield from call.keeping_partials(name, ops=("avg",))

    return Rule(rows, _added_alone, sizes=())


def _added_alone(local_call: LocalCall) -> LocalFunction | None:
    """Return only the added operand on a rank without elements of a factor.

    Kernels differ in the shape that they return for empty factors.
    """
    spec = local_call.outputs[0]
    has_empty_factor = any(0 in factor.local_shape for factor in local_call.inputs[1:])
    if not has_empty_factor:
        return None
    if local_call.call.written and 0 not in spec.local_shape:
        return None
    beta: float = local_call.call["beta"]

    def run(added: Tensor, first: Tensor, second: Tensor, *_: Any, **__: Any) -> Tensor:
        summand = (added * beta).to(spec.dtype)
        return with_dependence(summand.expand(spec.local_shape).clone(), first, second)

    return in_every_form(local_call.call, run)


_WITH_BIAS = _rule_of_sum("... k, n k -> ... n", "bias")


def _of_numbers(rule: Rule) -> Rule:
    """Return the rule of a product without rows for truth values, which no kernel multiplies.

    Kernels raise their error except for empty factors. Without rows every rank has all factors, so
    that all ranks raise it.
    """

    def rows(call: OpCall) -> Iterator[Row]:
        if all(operand.dtype != torch.bool for operand in call.tensors):
            yield from rule.rows(call)

    return replace(rule, rows=rows)


def linear(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `x @ w.T + b`."""
    is_vector = call["weight"].ndim == 1
    if call["bias"] is not None and not is_vector:
        yield from _WITH_BIAS.rows(call)
        return
    pattern = "... k, k -> ..." if is_vector else "... k, n k -> ... n"
    yield from product(pattern, linear=(0, 1)).rows(call)


def matmul(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `a @ b` for any numbers of dims; a vector is a matrix without one dim."""
    a, b = call.tensors
    # The dims of the matrices. Dims of a batch are added in front below.
    left = "k" if a.ndim == 1 else "m k"
    right = "k" if b.ndim == 1 else "k n"
    result = left.removesuffix("k") + right.removeprefix("k").strip()
    if a.ndim > 2:
        left = f"... {left}"
    if b.ndim > 2:
        right = f"... {right}"
    if max(a.ndim, b.ndim) > 2:
        result = f"... {result}"
    # Example: "m k, ... k n -> ... m n" for operands of 2 and 3 dims.
    rule = product(f"{left}, {right} -> {result}", linear=(0, 1))
    yield from rule.rows(call)


def kron(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `kron`, which merges dims pairwise from the right.

    An operand with fewer dims lacks dims on the left.
    """
    first, second = call.tensors
    ndim = max(first.ndim, second.ndim)
    left = _dims_at_the_right("a", first.ndim, ndim)
    right = _dims_at_the_right("b", second.ndim, ndim)
    # Example: "( b0) (a1 b1)" for operands of 1 and 2 dims.
    pairs = zip(left, right, strict=True)
    merged = [f"({a} {b})" for a, b in pairs]
    operands = f"{' '.join(left)}, {' '.join(right)}"
    pattern = f"{operands} -> {' '.join(merged)}"
    yield from product(pattern, linear=(0, 1)).rows(call)


def _dims_at_the_right(name: str, count: int, ndim: int) -> list[str]:
    """Return names for the last `count` of `ndim` dims, and empty names before: ["", "a1"]."""
    lacking = ndim - count
    names = [f"{name}{i}" for i in range(lacking, ndim)]
    return [""] * lacking + names


def batch_rows(call: OpCall) -> Iterator[Row]:
    """Yield rows for leading dims that all operands share; the last two dims are matrices."""
    # If the batch dim of an operand is broadcast (size 1), there is no row. An operand without
    # batch dims, such as pivots, is replicated.
    main = max(call.tensors, key=lambda t: t.ndim)
    for d, n in enumerate(main.shape[:-2]):
        inputs = [_batch_entry(t, d, n) for t in call.tensors]
        outputs = [_batch_entry(t, d, n) for t in call.outputs]
        lacking = [t for t, entry in zip(call.tensors, inputs, strict=True) if entry is R]
        are_pivots = all(t.ndim <= 1 for t in lacking)
        if are_pivots and R not in outputs:
            yield Row(tuple(inputs), tuple(outputs))


def _batch_entry(tensor: TensorMeta, dim: int, size: int) -> Entry:
    """Return the entry of a tensor in a batch whose dim `dim` of `size` matrices is sharded."""
    has_batch = tensor.ndim > dim and tensor.shape[dim] == size
    return S(dim) if has_batch else R


@where_sharded
def _trace(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    """Sum over shards the part of the global diagonal that crosses each shard."""
    # Example: for rows 2:4 of (4, 4) the offset is (2, 0), so the elements are (0, 2) and (1, 3) of
    # the shard.
    row, column = spec.local_offset
    return lambda matrix, *_, **__: matrix.diagonal(row - column).sum()


def linalg_cross(call: OpCall) -> Iterator[Row]:
    """Yield elementwise rows, except for the dim of three."""
    first_dim = 0 if call["self"].ndim >= call["other"].ndim else 1
    dim = call.dim("dim", first_dim)
    elementwise = product("..., ... -> ...", linear=(0, 1))
    for row in elementwise.rows(call):
        if row.outputs[0] != S(dim):
            yield row


def trilinear(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `_trilinear`, whose operands lack the dims that they are expanded by.

    Some dims of the product are summed.
    """
    dims = range(call["i1"].ndim + len(call["expand1"]))
    # Example: "d0 d2" for an operand that is expanded by dim 1 of 3.
    texts = []
    for lacking in ("expand1", "expand2", "expand3", "sumdim"):
        names = [f"d{d}" for d in dims if d not in call[lacking]]
        texts.append(" ".join(names))
    *operands, out = texts
    pattern = f"{', '.join(operands)} -> {out}"
    yield from product(pattern, linear=(0, 1, 2)).rows(call)


_MM = _of_numbers(product("m k, k n -> m n", linear=(0, 1)))
_BATCHED = Rule(batch_rows, unordered=True, skip_empty=True)


MATMUL: Table = family(
    {
        "mm": _MM,
        "_foreach_mm": replace(_MM, kind="each"),
        "bmm": _of_numbers(product("b m k, b k n -> b m n", linear=(0, 1))),
        "mv": _of_numbers(product("m k, k -> m", linear=(0, 1))),
        "dot vdot": _of_numbers(product("k, k -> ", linear=(0, 1))),
        "ger outer": product("m, n -> m n", linear=(0, 1)),
        "kron": Rule(kron),
        "matmul": _of_numbers(Rule(matmul, sizes=())),
        "linear": _of_numbers(Rule(linear, sizes=())),
        "addmm": _of_numbers(_rule_of_sum("m k, k n -> m n")),
        "addmv": _of_numbers(_rule_of_sum("m k, k -> m")),
        "addr": _rule_of_sum("m, n -> m n"),
        "baddbmm": _of_numbers(_rule_of_sum("b m k, b k n -> b m n")),
        "addbmm": _of_numbers(_rule_of_sum("b m k, b k n -> m n")),
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
        "_linalg_det _linalg_slogdet _linalg_eigh": _BATCHED,
        "_linalg_eigvals _linalg_svd _linalg_solve_ex": _BATCHED,
        "linalg_eig linalg_inv_ex linalg_ldl_factor_ex": _BATCHED,
        "linalg_ldl_solve linalg_lstsq linalg_lu": _BATCHED,
        "linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp": _BATCHED,
        "linalg_qr linalg_solve_triangular lu_unpack": _BATCHED,
        "linalg_householder_product geqrf ormqr triangular_solve": _BATCHED,
        # Every rank has all matrices, so all ranks raise the same error.
        "_linalg_check_errors": Rule(no_rows),
        # Its kernel is made of other operators, which use marks for conjugates.
        "linalg_pinv.atol_rtol_tensor*": Rule(
            batch_rows, lambda local_call: with_conjugates(local_call.call.op), skip_empty=True
        ),
        "linalg_cross": Rule(linalg_cross),
        "trace": _of_numbers(product("m n -> ", linear=(0,), local=_trace)),
        "_trilinear": Rule(trilinear),
        "_fft_c2c _fft_r2c _fft_c2r": Rule(
            lambda call: rows_sharded_alike(call, *call.dims()), skip_empty=True, linear="self"
        ),
    }
)
