"""Sharding of products of matrices and vectors, and of dense linear algebra by batch, on one mesh axis.

A factor in both inputs and the output shards all three; a factor only in the inputs is summed: partial output.
An added matrix (`addmm`) is then wanted as a partial sum too, so that it is counted once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .local import filling_out, or_empty
from .notation import Pattern, factor_rows, parse, product
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, Table
from .table import family

__all__ = ["LINALG"]


def _with_added(call: OpCall, index: int, text: str) -> Pattern:
    """`text` with one more operand at `index`, which has the last dims of the output (it broadcasts)."""
    pattern = parse(text)
    (made,) = pattern.outputs
    dims = made[len(made) - call.tensors[index].ndim :]
    return Pattern(text, (*pattern.inputs[:index], dims, *pattern.inputs[index:]), pattern.outputs)


def _without_sum(decided: LocalCall) -> LocalFunction | None:
    """A rank without elements of a factor has only the added operand (the kernels do not agree on its shape then)."""
    made, empty = decided.outputs[0], any(0 in spec.local_shape for spec in decided.inputs[1:])
    if not empty or 0 in made.local_shape:
        return or_empty(decided)
    beta: float = decided.call["beta"]

    def run(added: Tensor, *_: Any, **__: Any) -> Tensor:
        return (added * beta).to(made.dtype).expand(made.local_shape).clone()

    return None if decided.call.written else filling_out(decided.call, run)


def _added(text: str, *, index: int = 0) -> Rule:
    """`beta * c + alpha * (product)`, `c` being operand `index` and broadcasting."""

    def rows(call: OpCall) -> list[Row]:
        found = factor_rows(_with_added(call, index, text), call.tensors, call.outputs)
        summed = [
            Row(tuple(P("sum") if i == index else e for i, e in enumerate(row.inputs)), row.outputs)
            if row.outputs[0] == P("sum")
            else row
            for row in found
        ]
        return summed + _added_partials(len(call.tensors), index)

    return Rule(rows, _without_sum)


def _added_partials(count: int, index: int) -> list[Row]:
    """Linear in the added operand together with any one factor; an average may also meet a fixed added operand."""
    rows: list[Row] = []
    for factor in range(count):
        if factor == index:
            continue
        for op in ("sum", "avg"):
            inputs: tuple[Entry, ...] = tuple(P(op) if i in (index, factor) else R for i in range(count))
            rows.append(Row(inputs, (P(op),)))
        rows.append(Row(tuple(P("avg") if i == factor else R for i in range(count)), (P("avg"),)))
    rows.append(Row(tuple(P("avg") if i == index else R for i in range(count)), (P("avg"),)))
    return rows


def _linear(call: OpCall) -> list[Row]:
    """`x @ w.T + b`."""
    vector = "" if call.tensors[1].ndim == 1 else "n "
    if len(call.tensors) == 3 and vector:
        return _bias_rows(call)
    return list(product(f"... k, {vector}k -> ... {vector}", linear=(0, 1)).rows(call))


def _bias_rows(call: OpCall) -> list[Row]:
    found = factor_rows(parse("... k, n k, n -> ... n"), call.tensors, call.outputs)
    summed = [Row((*r.inputs[:2], P("sum")), r.outputs) if r.outputs[0] == P("sum") else r for r in found]
    return summed + _added_partials(3, 2)


def _matmul(call: OpCall) -> list[Row]:
    """`a @ b` for any numbers of dims; a vector is a matrix with one dim missing."""
    a, b = call.tensors
    left = "k" if a.ndim == 1 else "m k" if a.ndim == 2 else "... m k"
    right = "k" if b.ndim == 1 else "k n" if b.ndim == 2 else "... k n"
    batch = "... " if max(a.ndim, b.ndim) > 2 else ""
    made = f"{batch}{'m ' if a.ndim > 1 else ''}{'n' if b.ndim > 1 else ''}"
    return list(product(f"{left}, {right} -> {made}", linear=(0, 1)).rows(call))


def _kron(call: OpCall) -> list[Row]:
    """Dim by dim from the right, each pair of dims becomes one; an operand with fewer dims has none on the left."""
    ndims = [tensor.ndim for tensor in call.tensors]
    places = range(max(ndims))
    first, second = (
        [f"{name}{i}" if i >= max(ndims) - n else "" for i in places] for name, n in zip("ab", ndims, strict=True)
    )
    made = " ".join(f"({a} {b})" for a, b in zip(first, second, strict=True))
    return list(product(f"{' '.join(first)}, {' '.join(second)} -> {made}", linear=(0, 1)).rows(call))


LINALG: Table = family(
    {
        "mm": product("m k, k n -> m n", linear=(0, 1)),
        "bmm": product("b m k, b k n -> b m n", linear=(0, 1)),
        "mv": product("m k, k -> m", linear=(0, 1)),
        "dot vdot": product("k, k -> ", linear=(0, 1)),
        "ger outer": product("m, n -> m n", linear=(0, 1)),
        "kron": Rule(_kron),
        "matmul": Rule(_matmul),
        "linear": Rule(_linear),
        "addmm": _added("m k, k n -> m n"),
        "addmv": _added("m k, k -> m"),
        "addr": _added("m, n -> m n"),
        "baddbmm": _added("b m k, b k n -> b m n"),
        "addbmm": _added("b m k, b k n -> m n"),
    },
    unordered=True,
)
