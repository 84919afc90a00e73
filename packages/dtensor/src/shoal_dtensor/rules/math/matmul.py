"""Sharding of products of matrices and vectors and of distances between their rows, on one mesh axis.

A factor in both inputs and the output shards all three; a factor only in the inputs is summed: partial output.
An added matrix (`addmm`) must then be a partial sum too, so that it is counted once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal_mesh.internal import bound

from ..language.local_ops import in_every_form
from ..language.notation import Pattern, factor_rows, parse, product
from ..language.rule import LocalCall, LocalFunction, OpCall, P, Row, Rule, Table
from ..language.rule_tables import family

# --- a product and an added operand -----------------------------------------------------------------------------------


def _added(text: str, name: str = "self") -> Rule:
    """`beta * c + alpha * (product)`; `c` is the argument `name`, which has the last dims of the output."""

    def rows(call: OpCall) -> Iterator[Row]:
        pattern, (index,) = parse(text), call.places[name]
        (result,) = pattern.outputs
        dims = result[len(result) - call[name].ndim :]
        inputs = (*pattern.inputs[:index], dims, *pattern.inputs[index:])
        for row in factor_rows(Pattern(text, inputs, pattern.outputs), call.tensors, call.outputs):
            added = (P("sum"),) if row.outputs[0] == P("sum") else row.inputs[index : index + 1]
            yield replace(row, inputs=(*row.inputs[:index], *added, *row.inputs[index + 1 :]))
        yield from _added_partials(call, name)

    return Rule(rows, _added_alone, sizes=())


def _added_partials(call: OpCall, added: str) -> Iterator[Row]:
    """Linear in the added operand together with any one factor; an average may also meet a fixed added operand."""
    for factor in (name for name, place in call.places.items() if place and name != added):
        for op in ("sum", "avg"):
            both: dict[str, Any] = {added: P(op), factor: P(op)}
            yield call.row(out=P(op), **both)
        alone: dict[str, Any] = {factor: P("avg")}
        yield call.row(out=P("avg"), **alone)
    kept: dict[str, Any] = {added: P("avg")}
    yield call.row(out=P("avg"), **kept)


def _added_alone(local_call: LocalCall) -> LocalFunction | None:
    """A rank without elements of a factor has only the added operand (the kernels do not agree on its shape then)."""
    spec, empty = local_call.outputs[0], any(0 in spec.local_shape for spec in local_call.inputs[1:])
    if not empty or (local_call.call.written and 0 not in spec.local_shape):
        return None
    beta: float = local_call.call["beta"]

    def run(added: Tensor, first: Tensor, second: Tensor, *_: Any, **__: Any) -> Tensor:
        return bound((added * beta).to(spec.dtype).expand(spec.local_shape).clone(), first, second)

    return in_every_form(local_call.call, run)


# --- products ---------------------------------------------------------------------------------------------------------

_WITH_BIAS = _added("... k, n k -> ... n", "bias")


def linear(call: OpCall) -> Iterator[Row]:
    """`x @ w.T + b`."""
    vector = call["weight"].ndim == 1
    if call["bias"] is not None and not vector:
        yield from _WITH_BIAS.rows(call)
    else:
        yield from product("... k, k -> ..." if vector else "... k, n k -> ... n", linear=(0, 1)).rows(call)


def matmul(call: OpCall) -> Iterator[Row]:
    """`a @ b` for any numbers of dims; a vector is a matrix with one dim missing."""
    a, b = call.tensors
    left = "k" if a.ndim == 1 else "m k" if a.ndim == 2 else "... m k"
    right = "k" if b.ndim == 1 else "k n" if b.ndim == 2 else "... k n"
    batch = "... " if max(a.ndim, b.ndim) > 2 else ""
    result = f"{batch}{'m ' if a.ndim > 1 else ''}{'n' if b.ndim > 1 else ''}"
    yield from product(f"{left}, {right} -> {result}", linear=(0, 1)).rows(call)


def kron(call: OpCall) -> Iterator[Row]:
    """Dim by dim from the right, each pair of dims becomes one; an operand with fewer dims has none on the left."""
    ndims = [tensor.ndim for tensor in call.tensors]
    places = range(max(ndims))
    first, second = (
        [f"{name}{i}" if i >= max(ndims) - n else "" for i in places] for name, n in zip("ab", ndims, strict=True)
    )
    result = " ".join(f"({a} {b})" for a, b in zip(first, second, strict=True))
    yield from product(f"{' '.join(first)}, {' '.join(second)} -> {result}", linear=(0, 1)).rows(call)


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
    },
    unordered=True,
) | family(
    {
        # Distances between rows; torch's kernel of the gradient leaves out a batch that both sides share.
        "_cdist_forward _euclidean_dist": product("... p m, ... r m -> ... p r", replicated="m", skip_empty=True),
        "_cdist_backward": product("... p r, ... p m, ... r m, ... p r -> ... p m", linear=(0,), skip_empty=True),
    }
)
