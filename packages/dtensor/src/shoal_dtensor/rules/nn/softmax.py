"""Sharding of softmax and its like: other dims are free, the normalised dim takes one or two all-reduces."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, prod
from typing import Any

from torch import Tensor

from ..language.local_ops import all_reduce_traffic, all_reduced, in_every_form, sharding_axes
from ..language.rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table
from ..language.rule_tables import family


def _every_dim(call: OpCall, reductions: int, *names: str) -> Iterator[Row]:
    """All operands sharded alike; along the normalised dim `reductions` values per row are all-reduced."""
    result = call.outputs[0]
    if not result.ndim or not result.dtype.is_floating_point:  # no kernel: all ranks get the error of the global tensor
        return
    dim = call.dim()
    rows = prod(n for d, n in enumerate(result.shape) if d != dim)
    traffic = all_reduce_traffic(reductions * rows * result.dtype.itemsize)
    for d in range(result.ndim):
        entries: dict[str, Any] = dict.fromkeys((*names, "out"), S(d))
        yield call.row(traffic=traffic if d == dim else None, **entries)


def softmax(call: OpCall) -> Iterator[Row]:
    yield from _every_dim(call, 2, "self")


def softmax_backward(call: OpCall) -> Iterator[Row]:
    yield from _every_dim(call, 1, "grad_output", "output")
    yield from call.linear("grad_output")


def free_dims(call: OpCall) -> Iterator[Row]:
    """All dims but the normalised one, of all operands."""
    for d in range(call.outputs[0].ndim):
        if d != call.dim():
            entries: dict[str, Any] = dict.fromkeys((*call.places, "out"), S(d))
            yield call.row(**entries)


def glu_backward(call: OpCall) -> Iterator[Row]:
    yield from free_dims(call)
    yield from call.linear("grad_output")


def _normalised_axes(local_call: LocalCall) -> tuple[int, ...]:
    spec = local_call.inputs[0]
    return sharding_axes(spec, (local_call.call.dim(),)) if spec.ndim else ()


def _takes_logarithm(local_call: LocalCall) -> bool:
    return "log_softmax" in local_call.call.op.__name__


def _softmax(local_call: LocalCall) -> LocalFunction | None:
    """exp(x - max over shards) / sum over shards of exp(x - max over shards), or the logarithm of it."""
    axes = _normalised_axes(local_call)
    if not axes:
        return None
    dim, spec, dtype = local_call.call.dim(), local_call.inputs[0], local_call.outputs[0].dtype
    is_log = _takes_logarithm(local_call)

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        x = x.to(dtype)
        shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
        largest = x.amax(dim, keepdim=True) if x.numel() else x.new_full(shape, -inf)
        shifted = x - all_reduced(largest, spec, axes, "max")
        weights = shifted.exp()
        total = all_reduced(weights.sum(dim, keepdim=True), spec, axes)
        return shifted - total.log() if is_log else weights / total

    return in_every_form(local_call.call, run)


def _softmax_backward(local_call: LocalCall) -> LocalFunction | None:
    """G * y - y * (sum over shards of g * y); of the logarithm g - exp(y) * (sum over shards of g)."""
    axes = _normalised_axes(local_call)
    if not axes:
        return None
    dim, spec, dtype = local_call.call.dim(), local_call.inputs[0], local_call.outputs[0].dtype
    is_log = _takes_logarithm(local_call)

    def run(gradient: Tensor, output: Tensor, *_: Any, **__: Any) -> Tensor:
        weighted, weights = (gradient, output.exp()) if is_log else (gradient * output, output)
        return (weighted - weights * all_reduced(weighted.sum(dim, keepdim=True), spec, axes)).to(dtype)

    return in_every_form(local_call.call, run)


SOFTMAX: Table = family(
    {
        "_softmax _log_softmax": Rule(softmax, _softmax, sizes=()),
        "_safe_softmax": Rule(free_dims, skip_empty=True),
        "glu": Rule(free_dims),
        "glu_backward": Rule(glu_backward),
        "_softmax_backward_data _log_softmax_backward_data": Rule(softmax_backward, _softmax_backward, sizes=()),
    },
    unordered=True,
)
