"""Sharding of reductions, on one mesh axis.

A kept dim stays cut; cutting a reduced dim leaves a partial value where the reduction has a partial form.  Mean and
variance divide by the global count, so uneven shards are right.  Log-sum-exp finishes with an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from ..placements import Partial, norm_order
from .local import across, cutting, filling_out, restored
from .notation import unrounded
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["REDUCE", "reduced_dims"]


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims that the call reduces."""
    if call.get("dim") == [] and not call.get("keepdim") and call.outputs[0].ndim == call.tensors[0].ndim:
        return ()
    return call.dims()


def _rows(call: OpCall, made: Sequence[Entry] | None, traffic: int = 0) -> list[Row]:
    """One row per input dim; cutting a reduced dim gives `made`, or no row where that is None."""
    reduced, kept = reduced_dims(call), bool(call.get("keepdim", False))
    rows = []
    for dim in range(call.tensors[0].ndim):
        if dim not in reduced:
            target = dim if kept else dim - sum(other < dim for other in reduced)
            rows.append(Row((S(dim),), (S(target),) * len(call.outputs)))
        elif made is not None:
            rows.append(Row((S(dim),), tuple(made), traffic=traffic))
    return rows


def _partials(*ops: str) -> list[Row]:
    return [Row((P(op),), (P(op),)) for op in ops]


def _reduction(op: str, *passed: str, local: Callable[[LocalCall], LocalFunction | None] | None = None) -> Rule:
    """Cutting a reduced dim leaves `P(op)`; the partial values `passed` in pass through."""
    return Rule(lambda call: [*_rows(call, (P(op),)), *unrounded(_partials(*passed), call)], local)


def _result_bytes(call: OpCall) -> int:
    return sum(prod(made.shape) * made.dtype.itemsize for made in call.outputs)


def _count(decided: LocalCall) -> int:
    """How many global elements go into one result."""
    return prod(decided.inputs[0].shape[dim] for dim in reduced_dims(decided.call))


def _is_cut(decided: LocalCall) -> bool:
    return bool(cutting(decided.inputs[0], reduced_dims(decided.call)))


def _mean(decided: LocalCall) -> LocalFunction | None:
    if not _is_cut(decided):
        return None
    dims, count = list(reduced_dims(decided.call)), _count(decided)
    kept, dtype = bool(decided.call.get("keepdim", False)), decided.outputs[0].dtype

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.sum(x, dims, kept, dtype=dtype) / count

    return filling_out(decided.call, run)


def _moments(call: OpCall) -> list[Row]:
    """Variance as partial sum, mean whole (it is all-reduced on the way)."""
    made = (P("sum"), R)[: len(call.outputs)]
    return _rows(call, made, _result_bytes(call))


def _correction(call: OpCall) -> float:
    if "unbiased" in call.bound:
        return float(call["unbiased"])
    given = call.get("correction")
    return 1.0 if given is None else float(given)


def _deviations(decided: LocalCall) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], float]:
    """A function giving this rank's sum of squared deviations and the global mean, dims kept; and the divisor."""
    spec, dims, count = decided.inputs[0], list(reduced_dims(decided.call)), _count(decided)
    axes = cutting(spec, dims)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        mean = across(x.sum(dims, keepdim=True), spec, axes) / count
        distance = x - mean
        # Not by `conj()`: a conjugate is a mark, and marks are not looked at below a tensor subclass.
        square = distance.real**2 + distance.imag**2 if distance.is_complex() else distance * distance
        return square.sum(dims, keepdim=True), mean

    return run, max(count - _correction(decided.call), 0.0)


def _divided(squares: Tensor, divisor: float) -> Tensor:
    return squares / divisor if divisor else squares / torch.zeros((), dtype=squares.dtype, device=squares.device)


def _variance(decided: LocalCall) -> LocalFunction | None:
    if not _is_cut(decided):
        return None
    deviations, divisor = _deviations(decided)
    dims, kept, pair = reduced_dims(decided.call), bool(decided.call.get("keepdim", False)), len(decided.outputs) == 2

    def run(x: Tensor, *_: Any, **__: Any) -> Any:
        squares, mean = deviations(x)
        variance = restored(_divided(squares, divisor), dims, kept)
        return (variance, restored(mean, dims, kept)) if pair else variance

    return filling_out(decided.call, run)


def _standard(call: OpCall) -> list[Row]:
    return _rows(call, (R,) * len(call.outputs), 2 * _result_bytes(call))


def _deviation(decided: LocalCall) -> LocalFunction | None:
    if not _is_cut(decided):
        return None
    deviations, divisor = _deviations(decided)
    spec, dims, kept = decided.inputs[0], reduced_dims(decided.call), bool(decided.call.get("keepdim", False))
    axes, pair = cutting(spec, dims), len(decided.outputs) == 2

    def run(x: Tensor, *_: Any, **__: Any) -> Any:
        squares, mean = deviations(x)
        deviation = restored(_divided(across(squares, spec, axes), divisor).sqrt(), dims, kept)
        return (deviation, restored(mean, dims, kept)) if pair else deviation

    return filling_out(decided.call, run)


def _multiplied(call: OpCall) -> list[Row]:
    """No collective multiplies complex numbers: they are whole along what is reduced."""
    is_complex = call.outputs[0].dtype.is_complex
    return [*_rows(call, None if is_complex else (P("product"),)), *_partials("product")]


def _extremum(decided: LocalCall) -> LocalFunction | None:
    """The operator itself, except on an empty shard of what is not empty: there the value that never wins."""
    if 0 not in decided.inputs[0].local_shape or not _count(decided):
        return None
    spec = decided.outputs[0]
    largest = "amax" in decided.call.op.__name__ or "max" in decided.call.op.__name__
    return _constant(decided, _lowest(spec.dtype) if largest else _highest(spec.dtype))


def _lowest(dtype: torch.dtype) -> float:
    return -inf if dtype.is_floating_point else 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float:
    return inf if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _limited(call: OpCall) -> list[Row]:
    """`renorm`: every slice along its dim has a norm of its own."""
    return [Row((S(call.dim()),), (S(call.dim()),))]


def _order(call: OpCall) -> float:
    given = call.get("ord", call.get("p", 2))
    return 2.0 if given is None else float(given)


def _norm_rows(call: OpCall) -> list[Row]:
    """A norm over a cut dim is a partial norm, and so is a norm of partial norms of its own order."""
    made = _norm_entry(_order(call))
    passed = [Row((made,), (made,))] if norm_order(made.reduce_op) is not None else []
    return _rows(call, (made,)) + passed


def _norm_entry(order: float) -> Partial:
    simple = {inf: "max", -inf: "min", 0.0: "sum", 1.0: "sum"}
    return P(simple.get(order) or f"norm{order!r}")


def _norm(decided: LocalCall) -> LocalFunction | None:
    """The operator itself, except on an empty shard if that has no norm: there the value that counts for nothing."""
    order = _order(decided.call)
    if 0 not in decided.inputs[0].local_shape or 0 <= order < inf:
        return None
    return _constant(decided, 0.0 if order > 0 else inf)


def _norms(decided: LocalCall) -> LocalFunction | None:
    """The operator itself, unless this rank holds nothing of a tensor whose extremum is asked for."""
    order, op = float(decided.call["ord"]), decided.call.op
    if 0 <= order < inf or all(0 not in spec.local_shape for spec in decided.inputs):
        return None
    dtypes, neutral = [spec.dtype for spec in decided.outputs], 0.0 if order > 0 else inf

    def run(parts: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        return [
            op([part], *args, **kwargs)[0] if part.numel() else part.new_full((), neutral, dtype=dtype)
            for part, dtype in zip(parts, dtypes, strict=True)
        ]

    return run


def _constant(decided: LocalCall, value: float) -> LocalFunction:
    spec = decided.outputs[0]

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.full(spec.local_shape, value, dtype=spec.dtype, device=x.device)

    return filling_out(decided.call, run)


def _exponential_sum(decided: LocalCall) -> LocalFunction | None:
    if not _is_cut(decided):
        return None
    spec, dims, kept = decided.inputs[0], reduced_dims(decided.call), bool(decided.call.get("keepdim", False))
    axes, dtype = cutting(spec, dims), decided.outputs[0].dtype

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        x = x.to(dtype)
        shape = [1 if dim in dims else n for dim, n in enumerate(x.shape)]
        top = x.amax(dims, keepdim=True) if x.numel() else x.new_full(shape, -inf)
        top = across(top, spec, axes, "max")
        top = torch.where(top.isfinite(), top, 0)
        total = across((x - top).exp().sum(dims, keepdim=True), spec, axes)
        return restored(total.log() + top, dims, kept)

    return filling_out(decided.call, run)


def _exponential_rows(call: OpCall) -> list[Row]:
    """Complex numbers have no maximum to subtract."""
    return _rows(call, None if call.outputs[0].dtype.is_complex else (R,), 2 * _result_bytes(call))


def _counted(call: OpCall) -> list[Row]:
    return _rows(call, (P("sum"),))


REDUCE: Table = family(
    {
        "sum": _reduction("sum", "sum", "avg"),
        "nansum": _reduction("sum"),
        "mean": Rule(lambda call: [*_rows(call, (P("sum"),)), *unrounded(_partials("sum", "avg"), call)], _mean),
        "prod": Rule(_multiplied),
        "amax": _reduction("max", "max", local=_extremum),
        "amin": _reduction("min", "min", local=_extremum),
        "max.default max.unary_out": _reduction("max", "max", local=_extremum),
        "min.default min.unary_out": _reduction("min", "min", local=_extremum),
        "renorm": Rule(_limited),
        "any": _reduction("max"),
        "all": _reduction("min"),
        "count_nonzero": Rule(_counted),
        "var var_mean": Rule(_moments, _variance),
        "std std_mean": Rule(_standard, _deviation),
        "linalg_vector_norm norm": Rule(_norm_rows, _norm),
        "_foreach_norm": Rule(_norm_rows, _norms, each=True),
        "logsumexp special_logsumexp": Rule(_exponential_rows, _exponential_sum),
    },
    unordered=True,
)
