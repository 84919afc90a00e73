"""Sharding of normalisation of trailing dims: layer norm and RMS norm.

Free dims are free.  A sharded normalised dim is computed in plain torch around an all-reduce of the statistics.
Weight gradients of a sharded batch are partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...layout.spec import Spec
from ..language.local_ops import all_reduce_traffic, all_reduced, in_every_form, sharding_axes
from ..language.rule import LocalCall, LocalFunction, OpCall, P, Row, Rule, S, Table
from ..language.rule_tables import family


def _free(call: OpCall) -> int:
    """How many leading dims are not normalised."""
    return len(call["input"].shape) - len(call["normalized_shape"])


def _parameters(call: OpCall, dim: int) -> dict[str, Any]:
    """Entries of those of weight and bias that the operator has."""
    return {name: S(dim) for name in ("weight", "bias") if name in call.places}


def layer_norm(call: OpCall) -> Iterator[Row]:
    """A free dim with its statistics; a normalised dim with weight and bias, around replicated statistics."""
    free, statistics = _free(call), call.outputs[1:]
    for d in range(free):
        yield call.row(input=S(d), out=S(d))
    traffic = all_reduce_traffic(sum(prod(t.shape) * t.dtype.itemsize for t in statistics))
    for d in range(free, call["input"].ndim):
        yield call.row(input=S(d), out0=S(d), traffic=traffic, **_parameters(call, d - free))


def layer_norm_backward(call: OpCall) -> Iterator[Row]:
    free, rstd = _free(call), call["rstd"]
    statistics = [name for name in ("mean", "rstd") if name in call.places]
    for d in range(free):
        entries: dict[str, Any] = dict.fromkeys(statistics, S(d))
        yield call.row(grad_out=S(d), input=S(d), out0=S(d), out=P("sum"), **entries)
    traffic = all_reduce_traffic(2 * prod(rstd.shape) * rstd.dtype.itemsize)
    for d in range(free, call["input"].ndim):
        rest = _parameters(call, d - free)
        yield call.row(grad_out=S(d), input=S(d), out0=S(d), out=S(d - free), traffic=traffic, **rest)
    yield from call.linear("grad_out")


def _normalised_axes(decided: LocalCall, spec: Spec) -> tuple[int, ...]:
    return sharding_axes(spec, range(_free(decided.call), spec.ndim))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics are computed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _layer_norm(decided: LocalCall) -> LocalFunction | None:
    """Mean below = (sum over shards) / count; variance = (sum over shards of squared distances to it) / count."""
    spec, free = decided.inputs[0], _free(decided.call)
    axes = _normalised_axes(decided, spec)
    if not axes:
        return None
    dims, count = list(range(free, spec.ndim)), prod(spec.shape[free:])
    dtypes = [out.dtype for out in decided.outputs]

    def run(x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        wide = x.to(accumulation_dtype(x.dtype))
        mean = all_reduced(wide.sum(dims, keepdim=True), spec, axes) / count
        centred = wide - mean
        rstd = (all_reduced((centred * centred).sum(dims, keepdim=True), spec, axes) / count + eps).rsqrt()
        result = centred * rstd
        result = result if weight is None else result * weight
        result = result if bias is None else result + bias
        return result.to(dtypes[0]), mean.to(dtypes[1]), rstd.to(dtypes[2])

    return in_every_form(decided.call, run)


def _layer_norm_backward(decided: LocalCall) -> LocalFunction | None:
    """The two means of the gradient that the input's needs are sums over shards / count."""
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
        first, second = all_reduced(sums, spec, axes) / count
        gradients = (
            (scaled - first - normal * second) * rstd,
            _summed(gradient * normal, batch),
            _summed(gradient, batch),
        )
        return tuple(g.to(x.dtype) if wanted else None for g, wanted in zip(gradients, mask, strict=True))

    return run


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims) if dims else x


def _rms_norm(decided: LocalCall) -> LocalFunction | None:
    """Rstd below = 1 / sqrt((sum over shards of squares) / count + eps)."""
    spec, free = decided.inputs[0], _free(decided.call)
    axes = _normalised_axes(decided, spec)
    if not axes:
        return None
    dims, count = list(range(free, spec.ndim)), prod(spec.shape[free:])
    dtypes = [out.dtype for out in decided.outputs]

    def run(x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
        wide = x.to(accumulation_dtype(x.dtype))
        squares = all_reduced((wide * wide).sum(dims, keepdim=True), spec, axes)
        rstd = (squares / count + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
        result = wide * rstd if weight is None else wide * rstd * weight
        return result.to(dtypes[0]), rstd.to(dtypes[1])

    return run


def _rms_norm_backward(decided: LocalCall) -> LocalFunction | None:
    """Projection below = (sum over shards of gradient times normalised input) / count."""
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
        projection = all_reduced((scaled * normal).sum(dims, keepdim=True), spec, axes) / count
        gradients = ((scaled - normal * projection) * rstd, _summed(gradient * normal, batch))
        return tuple(g.to(x.dtype) if wanted else None for g, wanted in zip(gradients, mask, strict=True))

    return run


_SIZES = ("normalized_shape",)

LAYER_NORM: Table = family(
    {
        "native_layer_norm": Rule(layer_norm, _layer_norm, skip_empty=True, sizes=_SIZES),
        "native_layer_norm_backward": Rule(layer_norm_backward, _layer_norm_backward, sizes=_SIZES),
        "_fused_rms_norm": Rule(layer_norm, _rms_norm, skip_empty=True, sizes=_SIZES),
        "_fused_rms_norm_backward": Rule(layer_norm_backward, _rms_norm_backward, sizes=_SIZES),
    },
    unordered=True,
)
