"""Sharding of optimizer and AMP operators: element by element of their lists, all state cut alike."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_reduce

from .local import cutting
from .notation import pointwise
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["OPTIM"]

_EACH = replace(pointwise(), each=True)


def _unscale_rows(call: OpCall) -> list[Row]:
    (gradient, *_rest) = call.tensors
    return [Row((S(d), R, R), ()) for d in range(gradient.ndim)]


def _unscale(decided: LocalCall) -> LocalFunction | None:
    """Unscale this rank's parts; an infinity anywhere is found everywhere."""
    *gradients, found, _scale = decided.inputs
    axes = tuple(sorted({axis for spec in gradients for axis in cutting(spec)}))
    if not axes:
        return None
    comm, op = found.mesh.comm(axes), decided.call.op

    def run(parts: list[Tensor], found_inf: Tensor, scale: Tensor) -> None:
        op(parts, found_inf, scale)
        found_inf.copy_(all_reduce(found_inf, comm, "max"))

    return run


def _norm_rows(call: OpCall) -> list[Row]:
    order = float(call["ord"])
    made: Entry = {inf: P("max"), -inf: P("min"), 0.0: P("sum"), 1.0: P("sum")}.get(order, R)
    (x,) = call.tensors
    traffic = 0 if made is not R else call.outputs[0].dtype.itemsize
    return [Row((S(d),), (made,), traffic=traffic) for d in range(x.ndim)]


def _norm(decided: LocalCall) -> LocalFunction | None:
    """Norms of all tensors; those over the same axes share one all-reduce."""
    order = float(decided.call["ord"])
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, spec in enumerate(decided.inputs):
        groups.setdefault(cutting(spec), []).append(i)
    if not any(groups):
        return None
    rooted = abs(order) not in (0.0, 1.0, inf)
    comms = [(decided.inputs[0].mesh.comm(axes), members) for axes, members in groups.items() if axes and rooted]
    op = decided.call.op

    def run(parts: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        norms = list(_norms_of(op, parts, order, args, kwargs))
        for comm, members in comms:
            together = all_reduce(torch.stack([norms[i] ** order for i in members]), comm) ** (1 / order)
            for i, value in zip(members, together.unbind(), strict=True):
                norms[i] = value
        return norms

    return run


def _norms_of(op: Any, parts: list[Tensor], order: float, args: Any, kwargs: Any) -> list[Tensor]:
    """The local norms; the extremum of an empty part never wins."""
    if abs(order) != inf or all(part.numel() for part in parts):
        found: list[Tensor] = op(parts, *args, **kwargs)
        return found
    neutral = 0.0 if order > 0 else inf
    return [op([part], *args, **kwargs)[0] if part.numel() else part.new_full((), neutral) for part in parts]


OPTIM: Table = family(
    {
        "_fused_sgd _fused_adam _fused_adamw _fused_adagrad": _EACH,
        "_amp_foreach_non_finite_check_and_unscale": Rule(_unscale_rows, _unscale, by_value=False, each=True),
        "_foreach_norm": Rule(_norm_rows, _norm, each=True),
    }
)
