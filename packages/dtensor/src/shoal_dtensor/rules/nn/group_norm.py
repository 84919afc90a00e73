"""Sharding of group norm: batch, channels at group borders, and the dims behind them.

With those sharded it is computed in plain torch around an all-reduce of the groups' statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..language.local_ops import all_reduce_traffic, all_reduced, in_every_form, sharding_axes, with_arguments
from ..language.rule import LocalCall, LocalFunction, OpCall, P, Row, Rule, S, Table, Traffic
from ..language.rule_tables import family
from .layer_norm import accumulation_dtype

SPATIAL = 2  # the first dim behind the channels


def group_norm(call: OpCall) -> Iterator[Row]:
    """6 channels in 3 groups of 2 (`unit`) are sharded as 3 steps: a rank has 2, 4 or 6 channels."""
    unit = call["C"] // call["group"]
    yield call.row(input=S(0), out=S(0))
    yield call.row(input=S(1, unit), weight=S(0, unit), bias=S(0, unit), out0=S(1, unit), out=S(1))
    for d in range(SPATIAL, call["input"].ndim):
        yield call.row(input=S(d), out0=S(d), traffic=_two_sums(call))


def group_norm_backward(call: OpCall) -> Iterator[Row]:
    unit = call["C"] // call["group"]
    yield call.row(grad_out=S(0), input=S(0), mean=S(0), rstd=S(0), out0=S(0), out=P("sum"))
    yield call.row(
        grad_out=S(1, unit), input=S(1, unit), mean=S(1), rstd=S(1), weight=S(0, unit), out0=S(1, unit), out=S(0, unit)
    )
    for d in range(SPATIAL, call["input"].ndim):
        yield call.row(grad_out=S(d), input=S(d), out0=S(d), out=P("sum"), traffic=_two_sums(call))
    yield from call.linear("grad_out")


def _two_sums(call: OpCall) -> Traffic:
    """The all-reduce of two numbers per sample and group."""
    return all_reduce_traffic(2 * call["N"] * call["group"] * call["input"].dtype.itemsize)


def _resized(decided: LocalCall) -> LocalFunction | None:
    """The operator with the batch size, channels and groups of this rank."""
    call = decided.call
    batch, channels = decided["input"].local_shape[:2]
    if (batch, channels) == (call["N"], call["C"]):
        return None
    return with_arguments(call, N=batch, C=channels, group=channels * call["group"] // max(call["C"], 1))


def _split(x: Tensor, unit: int) -> Tensor:
    """`(batch, groups, the rest)` of `(batch, channels, ...)`."""
    return x.reshape(x.shape[0], x.shape[1] // unit, unit * prod(x.shape[2:]))


def _normalise(decided: LocalCall) -> LocalFunction | None:
    """Mean = (sum over shards of x) / count; variance = (sum over shards of (x - mean) ** 2) / count, per group."""
    call, spec = decided.call, decided["input"]
    axes = sharding_axes(spec, range(SPATIAL, spec.ndim))
    if not axes:
        return _resized(decided)
    unit = call["C"] // call["group"]
    count, dtypes = unit * prod(spec.shape[SPATIAL:]), [out.dtype for out in decided.outputs]

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any, **_: Any) -> tuple[Tensor, ...]:
        wide = _split(x.to(accumulation_dtype(x.dtype)), unit)
        mean = all_reduced(wide.sum(2), spec, axes) / count
        centred = wide - mean.unsqueeze(2)
        rstd = (all_reduced((centred * centred).sum(2), spec, axes) / count + rest[-1]).rsqrt()
        result = (centred * rstd.unsqueeze(2)).reshape(x.shape)
        result = result if weight is None else result * _per_channel(weight, x.ndim)
        result = result if bias is None else result + _per_channel(bias, x.ndim)
        return result.to(dtypes[0]), mean.to(dtypes[1]), rstd.to(dtypes[2])

    return in_every_form(call, run)


def _per_channel(vector: Tensor, ndim: int) -> Tensor:
    return vector.view(-1, *(1,) * (ndim - 2))


def _normalise_backward(decided: LocalCall) -> LocalFunction | None:
    """The two means of the gradient that the input's needs are sums over shards / count, per group."""
    call, spec = decided.call, decided["input"]
    axes = sharding_axes(spec, range(SPATIAL, spec.ndim))
    if not axes:
        return _resized(decided)
    unit, mask = call["C"] // call["group"], call["output_mask"]
    count, others = unit * prod(spec.shape[SPATIAL:]), [d for d in range(spec.ndim) if d != 1]

    def run(
        gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *_: Any, **__: Any
    ) -> tuple[Tensor | None, ...]:
        wide = gradient.to(accumulation_dtype(x.dtype))
        mean, rstd = mean.unsqueeze(2), rstd.unsqueeze(2)
        normal = (_split(x.to(wide.dtype), unit) - mean) * rstd
        scaled = _split(wide if weight is None else wide * _per_channel(weight, x.ndim), unit)
        sums = all_reduced(torch.stack([scaled.sum(2), (scaled * normal).sum(2)]), spec, axes) / count
        first, second = sums.unsqueeze(3)
        result = ((scaled - first - normal * second) * rstd).reshape(x.shape)
        gradients = (result, (wide * normal.reshape(x.shape)).sum(others), wide.sum(others))
        return tuple(g.to(x.dtype) if wanted else None for g, wanted in zip(gradients, mask, strict=True))

    return in_every_form(call, run)


GROUP_NORM: Table = family(
    {
        "native_group_norm": Rule(group_norm, _normalise, skip_empty=True),
        "native_group_norm_backward": Rule(group_norm_backward, _normalise_backward, skip_empty=True),
    }
)
