"""Sharding of softmax and its like, on one mesh axis: other dims are free, the normalised dim takes two all-reduces."""

from __future__ import annotations

from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from .local import across, cutting, filling_out, or_empty
from .notation import linear_rows
from .rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table
from .table import family

__all__ = ["SOFTMAX"]


def _rows(call: OpCall, reductions: int) -> list[Row]:
    made = call.outputs[0]
    if not made.ndim or not made.dtype.is_floating_point:  # no kernel: all ranks learn it from the whole tensor
        return []
    dim = call.dim()
    traffic = reductions * made.dtype.itemsize * prod(made.shape) // max(made.shape[dim], 1)
    count = len(call.tensors)
    return [Row((S(d),) * count, (S(d),), traffic=traffic if d == dim else 0) for d in range(made.ndim)]


def _forward_rows(call: OpCall) -> list[Row]:
    return _rows(call, 2)


def _backward_rows(call: OpCall) -> list[Row]:
    return [*_rows(call, 1), *linear_rows((0,), 2, 1)]


def _shifted(x: Tensor, dim: int, decided: LocalCall, axes: tuple[int, ...]) -> Tensor:
    """`x` minus the global maximum along `dim`, in the output's dtype."""
    spec = decided.inputs[0]
    x = x.to(decided.outputs[0].dtype)
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    top = x.amax(dim, keepdim=True) if x.numel() else x.new_full(shape, -inf)
    return x - across(top, spec, axes, "max")


def _softmax(decided: LocalCall) -> LocalFunction | None:
    dim, spec = decided.call.dim(), decided.inputs[0]
    axes = cutting(spec, (dim,)) if spec.ndim else ()
    if not axes:
        return None

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        weights = _shifted(x, dim, decided, axes).exp()
        return weights / across(weights.sum(dim, keepdim=True), spec, axes)

    return filling_out(decided.call, run)


def _log_softmax(decided: LocalCall) -> LocalFunction | None:
    dim, spec = decided.call.dim(), decided.inputs[0]
    axes = cutting(spec, (dim,)) if spec.ndim else ()
    if not axes:
        return None

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        shifted = _shifted(x, dim, decided, axes)
        return shifted - across(shifted.exp().sum(dim, keepdim=True), spec, axes).log()

    return filling_out(decided.call, run)


def _softmax_backward(decided: LocalCall) -> LocalFunction | None:
    dim, spec, dtype = decided.call.dim(), decided.inputs[0], decided.outputs[0].dtype
    axes = cutting(spec, (dim,)) if spec.ndim else ()
    if not axes:
        return None

    def run(gradient: Tensor, output: Tensor, *_: Any, **__: Any) -> Tensor:
        weighted = gradient * output
        return (weighted - output * across(weighted.sum(dim, keepdim=True), spec, axes)).to(dtype)

    return filling_out(decided.call, run)


def _log_softmax_backward(decided: LocalCall) -> LocalFunction | None:
    dim, spec, dtype = decided.call.dim(), decided.inputs[0], decided.outputs[0].dtype
    axes = cutting(spec, (dim,)) if spec.ndim else ()
    if not axes:
        return None

    def run(gradient: Tensor, output: Tensor, *_: Any, **__: Any) -> Tensor:
        total = across(gradient.sum(dim, keepdim=True), spec, axes)
        return (gradient - torch.exp(output) * total).to(dtype)

    return filling_out(decided.call, run)


def _free_rows(call: OpCall) -> list[Row]:
    """All dims but the normalised one."""
    made = call.outputs[0]
    return [Row((S(d),) * len(call.tensors), (S(d),)) for d in range(made.ndim) if d != call.dim()]


SOFTMAX: Table = family(
    {
        "_softmax": Rule(_forward_rows, _softmax),
        "_safe_softmax": Rule(_free_rows, or_empty),
        "glu": Rule(_free_rows),
        "glu_backward": Rule(lambda call: [*_free_rows(call), *linear_rows((0,), 2, 1)]),
        "_log_softmax": Rule(_forward_rows, _log_softmax),
        "_softmax_backward_data": Rule(_backward_rows, _softmax_backward),
        "_log_softmax_backward_data": Rule(_backward_rows, _log_softmax_backward),
    },
    unordered=True,
)
