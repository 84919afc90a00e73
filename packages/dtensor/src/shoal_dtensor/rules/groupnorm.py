"""Sharding of group norm, on one mesh axis: batch, channels at group borders, and the dims behind them.

With those cut it is computed in plain torch around an all-reduce of the groups' statistics.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..spec import Spec
from .local import across, cutting, filling_out, replacing, zeros
from .norm import acc, entries, present
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["GROUPNORM"]

SPATIAL = 2  # the first dim behind the channels


def _forward(call: OpCall) -> list[Row]:
    names = present(call, "input", "weight", "bias")
    unit = call["C"] // call["group"]
    channels: dict[str, Entry] = {"input": S(1, unit), "weight": S(0, unit), "bias": S(0, unit)}
    rows = [
        Row(entries(names, {"input": S(0)}), (S(0), S(0), S(0))),
        Row(entries(names, channels), (S(1, unit), S(1), S(1))),
    ]
    spatial = range(SPATIAL, call["input"].ndim)
    traffic = _traffic(call)
    return rows + [Row(entries(names, {"input": S(d)}), (S(d), R, R), traffic=traffic) for d in spatial]


def _backward(call: OpCall) -> list[Row]:
    names = present(call, "grad_out", "input", "mean", "rstd", "weight")
    unit, mask = call["C"] // call["group"], call["output_mask"]
    batch: dict[str, Entry] = dict.fromkeys(("grad_out", "input", "mean", "rstd"), S(0))
    channels: dict[str, Entry] = {"grad_out": S(1, unit), "input": S(1, unit), "mean": S(1), "rstd": S(1)}
    channels["weight"] = S(0, unit)
    cases: list[tuple[dict[str, Entry], tuple[Entry, ...], int]] = [
        (batch, (S(0), P("sum"), P("sum")), 0),
        (channels, (S(1, unit), S(0, unit), S(0, unit)), 0),
        ({"grad_out": P("sum")}, (P("sum"),) * 3, 0),
    ]
    cases += [
        ({"grad_out": S(d), "input": S(d)}, (S(d), P("sum"), P("sum")), _traffic(call))
        for d in range(SPATIAL, call["input"].ndim)
    ]
    return [
        Row(entries(names, known), tuple(e for e, wanted in zip(made, mask, strict=True) if wanted), traffic=traffic)
        for known, made, traffic in cases
    ]


def _traffic(call: OpCall) -> int:
    """Bytes of two statistics of every group."""
    return int(2 * call["N"] * call["group"] * call["input"].dtype.itemsize)


def _input(decided: LocalCall) -> Spec:
    names = present(decided.call, "grad_out", "input")
    return decided.inputs[names.index("input")]


def _resized(decided: LocalCall) -> LocalFunction | None:
    """Batch size, channels and groups of this rank's part."""
    call = decided.call
    batch, channels = _input(decided).local_shape[:2]
    groups = channels * call["group"] // max(call["C"], 1)
    if (batch, channels) == (call["N"], call["C"]):
        return None
    if not batch or not channels:
        return zeros(decided)
    return replacing(call, N=batch, C=channels, group=groups)


def _split(x: Tensor, unit: int) -> Tensor:
    """`(batch, groups, the rest)` of `(batch, channels, ...)`."""
    return x.reshape(x.shape[0], x.shape[1] // unit, unit * prod(x.shape[2:]))


def _normalise(decided: LocalCall) -> LocalFunction | None:
    call, spec = decided.call, _input(decided)
    axes = cutting(spec, range(SPATIAL, spec.ndim))
    if not axes:
        return _resized(decided)
    unit = call["C"] // call["group"]
    count, kinds = unit * prod(spec.shape[SPATIAL:]), [out.dtype for out in decided.outputs]

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any, **_: Any) -> tuple[Tensor, ...]:
        wide = _split(x.to(acc(x.dtype)), unit)
        mean = across(wide.sum(2), spec, axes) / count
        centred = wide - mean.unsqueeze(2)
        rstd = (across((centred * centred).sum(2), spec, axes) / count + rest[-1]).rsqrt()
        result = (centred * rstd.unsqueeze(2)).reshape(x.shape)
        result = result if weight is None else result * _per_channel(weight, x.ndim)
        result = result if bias is None else result + _per_channel(bias, x.ndim)
        return result.to(kinds[0]), mean.to(kinds[1]), rstd.to(kinds[2])

    return filling_out(call, run)


def _per_channel(vector: Tensor, ndim: int) -> Tensor:
    return vector.view(-1, *(1,) * (ndim - 2))


def _normalise_backward(decided: LocalCall) -> LocalFunction | None:
    call, spec = decided.call, _input(decided)
    axes = cutting(spec, range(SPATIAL, spec.ndim))
    if not axes:
        return _resized(decided)
    unit, mask = call["C"] // call["group"], call["output_mask"]
    count, others = unit * prod(spec.shape[SPATIAL:]), [d for d in range(spec.ndim) if d != 1]

    def run(
        gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *_: Any, **__: Any
    ) -> tuple[Tensor | None, ...]:
        wide = gradient.to(acc(x.dtype))
        mean, rstd = mean.unsqueeze(2), rstd.unsqueeze(2)
        normal = (_split(x.to(wide.dtype), unit) - mean) * rstd
        scaled = _split(wide if weight is None else wide * _per_channel(weight, x.ndim), unit)
        sums = across(torch.stack([scaled.sum(2), (scaled * normal).sum(2)]), spec, axes) / count
        first, second = sums.unsqueeze(3)
        result = ((scaled - first - normal * second) * rstd).reshape(x.shape)
        made = (result, (wide * normal.reshape(x.shape)).sum(others), wide.sum(others))
        return tuple(g.to(x.dtype) if wanted else None for g, wanted in zip(made, mask, strict=True))

    return filling_out(call, run)


GROUPNORM: Table = family(
    {
        "native_group_norm": Rule(_forward, _normalise),
        "native_group_norm_backward": Rule(_backward, _normalise_backward),
    }
)
