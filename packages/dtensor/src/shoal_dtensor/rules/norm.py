"""Sharding of normalisation of trailing dims, on one mesh axis: layer norm and RMS norm.

Free dims are free.  A cut normalised dim is computed in plain torch around an all-reduce of the statistics.
Weight gradients of a cut batch are partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..spec import Spec, TensorMeta
from .local import across, cutting, filling_out, or_empty
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["NORM", "acc", "entries", "present"]


def present(call: OpCall, *names: str) -> tuple[str, ...]:
    """Those tensor arguments that are not None."""
    return tuple(name for name in names if isinstance(call.get(name), TensorMeta))


def entries(names: Sequence[str], known: dict[str, Entry]) -> tuple[Entry, ...]:
    """How the arguments `names` lie: whole unless known otherwise."""
    return tuple(known.get(name, R) for name in names)


def _free(call: OpCall) -> int:
    """How many leading dims are not normalised."""
    (source,) = (call["input"],)
    return len(source.shape) - len(call["normalized_shape"])


def _trailing(call: OpCall, statistics: int) -> list[Row]:
    """Forward: the input's free dims with the statistics; a normalised dim with weight and bias, statistics whole."""
    free, ndim = _free(call), len(call["input"].shape)
    names = present(call, "input", "weight", "bias")
    rows = [Row(entries(names, {"input": S(d)}), (S(d),) * (1 + statistics)) for d in range(free)]
    traffic = statistics * prod(call.outputs[-1].shape) * call.outputs[-1].dtype.itemsize
    for d in range(free, ndim):
        known: dict[str, Entry] = {"input": S(d), "weight": S(d - free), "bias": S(d - free)}
        rows.append(Row(entries(names, known), (S(d), *(R,) * statistics), traffic=traffic))
    return rows


def _trailing_backward(call: OpCall, statistics: Sequence[str]) -> list[Row]:
    free, ndim = _free(call), len(call["input"].shape)
    names = present(call, "grad_out", "input", *statistics, "weight", "bias")
    mask = call["output_mask"]

    def made(each: Sequence[Entry]) -> tuple[Entry, ...]:
        return tuple(e for e, wanted in zip(each, mask, strict=True) if wanted)

    gradients = len(mask) - 1
    rows = []
    for d in range(free):
        known: dict[str, Entry] = dict.fromkeys(("grad_out", "input", *statistics), S(d))
        rows.append(Row(entries(names, known), made((S(d), *(P("sum"),) * gradients))))
    traffic = 2 * prod(call[statistics[-1]].shape) * call[statistics[-1]].dtype.itemsize
    for d in range(free, ndim):
        known = {"grad_out": S(d), "input": S(d), "weight": S(d - free), "bias": S(d - free)}
        rows.append(Row(entries(names, known), made((S(d), *(S(d - free),) * gradients)), traffic=traffic))
    linear = [Row(entries(names, {"grad_out": P(op)}), made((P(op),) * len(mask))) for op in ("sum", "avg")]
    return rows + linear


def _normalised_axes(decided: LocalCall, spec: Spec) -> tuple[int, ...]:
    return cutting(spec, range(_free(decided.call), spec.ndim))


def acc(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics are computed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _layer_norm(decided: LocalCall) -> LocalFunction | None:
    spec, free = decided.inputs[0], _free(decided.call)
    axes = _normalised_axes(decided, spec)
    if not axes:
        return or_empty(decided)
    dims, count = list(range(free, spec.ndim)), prod(spec.shape[free:])
    kinds = [out.dtype for out in decided.outputs]

    def run(x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        wide = x.to(acc(x.dtype))
        mean = across(wide.sum(dims, keepdim=True), spec, axes) / count
        centred = wide - mean
        rstd = (across((centred * centred).sum(dims, keepdim=True), spec, axes) / count + eps).rsqrt()
        result = centred * rstd
        result = result if weight is None else result * weight
        result = result if bias is None else result + bias
        return result.to(kinds[0]), mean.to(kinds[1]), rstd.to(kinds[2])

    return filling_out(decided.call, run)


def _layer_norm_backward(decided: LocalCall) -> LocalFunction | None:
    spec, free = decided.inputs[1], _free(decided.call)
    axes = _normalised_axes(decided, spec)
    if not axes:
        return None
    dims, batch, count = list(range(free, spec.ndim)), list(range(free)), prod(spec.shape[free:])
    mask = decided.call["output_mask"]

    def run(
        gradient: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, weight: Tensor | None, *_: Any, **__: Any
    ) -> tuple[Tensor | None, ...]:
        normal = (x - mean) * rstd
        scaled = gradient if weight is None else gradient * weight
        sums = torch.stack([scaled.sum(dims, keepdim=True), (scaled * normal).sum(dims, keepdim=True)])
        first, second = across(sums, spec, axes) / count
        wide = (
            (scaled - first - normal * second) * rstd,
            _summed(gradient * normal, batch),
            _summed(gradient, batch),
        )
        return tuple(g.to(x.dtype) if wanted else None for g, wanted in zip(wide, mask, strict=True))

    return run


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims) if dims else x


def _rms_norm(decided: LocalCall) -> LocalFunction | None:
    spec, free = decided.inputs[0], _free(decided.call)
    axes = _normalised_axes(decided, spec)
    if not axes:
        return or_empty(decided)
    dims, count = list(range(free, spec.ndim)), prod(spec.shape[free:])
    kinds = [out.dtype for out in decided.outputs]

    def run(x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
        wide = x.to(acc(x.dtype))
        squares = across((wide * wide).sum(dims, keepdim=True), spec, axes)
        rstd = (squares / count + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
        result = wide * rstd if weight is None else wide * rstd * weight
        return result.to(kinds[0]), rstd.to(kinds[1])

    return run


def _rms_norm_backward(decided: LocalCall) -> LocalFunction | None:
    spec, free = decided.inputs[1], _free(decided.call)
    axes = _normalised_axes(decided, spec)
    if not axes:
        return None
    dims, batch, count = list(range(free, spec.ndim)), list(range(free)), prod(spec.shape[free:])
    mask = decided.call["output_mask"]

    def run(
        gradient: Tensor, x: Tensor, shape: Any, rstd: Tensor, weight: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        normal = x * rstd
        scaled = gradient if weight is None else gradient * weight
        share = across((scaled * normal).sum(dims, keepdim=True), spec, axes) / count
        wide = ((scaled - normal * share) * rstd, _summed(gradient * normal, batch))
        return tuple(g.to(x.dtype) if wanted else None for g, wanted in zip(wide, mask, strict=True))

    return run


NORM: Table = family(
    {
        "native_layer_norm": Rule(lambda call: _trailing(call, 2), _layer_norm, unordered=True),
        "native_layer_norm_backward": Rule(
            lambda call: _trailing_backward(call, ("mean", "rstd")), _layer_norm_backward, unordered=True
        ),
        "_fused_rms_norm": Rule(lambda call: _trailing(call, 1), _rms_norm, unordered=True),
        "_fused_rms_norm_backward": Rule(
            lambda call: _trailing_backward(call, ("rstd",)), _rms_norm_backward, unordered=True
        ),
    }
)
