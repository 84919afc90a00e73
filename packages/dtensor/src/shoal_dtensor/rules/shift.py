"""Sharding of operators that shift, reverse or repeat whole dims: roll, flip, rot90, repeat.

Along a sharded dim, each rank sends exactly the ranges that others need; the result is cut as the input is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..chunks import Cut
from .local import filling_out
from .relocate import Run, relocate
from .rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table
from .table import family
from .view import any_partial, kept_dims
from .window import default_cut

__all__ = ["SHIFT"]

aten = torch.ops.aten


def _traffic(call: OpCall) -> int:
    """What a rank sends when every rank sends its piece on; a rule does not know how many there are, so say four."""
    return prod(call.outputs[0].shape) * call.outputs[0].dtype.itemsize // 4


# --- roll and flip ----------------------------------------------------------------------------------------------------


def _rearranged(call: OpCall) -> dict[int, tuple[Run, ...]]:
    """For every dim that roll or flip rearranges, where its positions come from."""
    (source,) = call.tensors
    if call.get("shifts") is None:
        lengths = {int(d) % max(source.ndim, 1): source.shape[d] for d in call["dims"]} if source.ndim else {}
        return {d: (Run(n - 1, 0, n, back=True),) for d, n in lengths.items()}
    found: dict[int, int] = {}
    for d, shift in zip(call["dims"], call["shifts"], strict=True):
        found[int(d) % source.ndim] = found.get(int(d) % source.ndim, 0) + int(shift)
    turns = {d: shift % max(source.shape[d], 1) for d, shift in found.items()}
    return {d: (Run(0, k, source.shape[d] - k), Run(source.shape[d] - k, 0, k)) for d, k in turns.items()}


def _shift_rows(call: OpCall) -> list[Row]:
    (source,) = call.tensors
    if call.get("shifts") is not None and not call["dims"]:  # rolls the flattened tensor
        return any_partial(1, 1)
    moving = _rearranged(call)
    kept = kept_dims((d, d) for d in range(source.ndim) if d not in moving)
    rows = [Row((S(d),), (S(d),), traffic=_traffic(call)) for d in moving]
    return kept + rows + any_partial(1, 1)


def _shift_local(decided: LocalCall) -> LocalFunction | None:
    """Rearrange the whole dims locally and the cut ones between ranks; dims are independent of each other."""
    call, (source,), (target,) = decided.call, decided.inputs, decided.outputs
    if call.get("shifts") is not None and not call["dims"]:
        return None
    moving = _rearranged(call)
    cut = [d for d in moving if source.cuts[d].axes]
    if not cut:
        return None
    moves = [relocate(d, source, target, moving[d]) for d in cut]
    whole = [i for i, d in enumerate(call["dims"]) if int(d) % source.ndim not in cut]
    dims = [call["dims"][i] for i in whole]
    shifts = None if call.get("shifts") is None else [call["shifts"][i] for i in whole]

    def run(x: Tensor, *args: Any) -> Tensor:
        if dims:
            x = aten.flip.default(x, dims) if shifts is None else aten.roll.default(x, shifts, dims)
        for move in moves:
            x = move(x)
        return x

    return filling_out(call, run)


# --- rot90 ------------------------------------------------------------------------------------------------------------


def _rot90_rows(call: OpCall) -> list[Row]:
    ndim = call.tensors[0].ndim
    turned = {int(d) % ndim for d in call["dims"]}
    return kept_dims((d, d) for d in range(ndim) if d not in turned) + any_partial(1, 1)


# --- repeat -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Repeated:
    """The default cut of a dim that became `times` as long."""

    times: int

    def __call__(self, cut: Cut) -> Cut:
        return default_cut(cut.length * self.times, cut)


def _repeat_rows(call: OpCall) -> list[Row]:
    repeats, ndim = call["repeats"], call.tensors[0].ndim
    new = len(repeats) - ndim
    rows = kept_dims((d, d + new) for d in range(ndim) if repeats[d + new] == 1)
    for d in range(ndim):
        if repeats[d + new] > 1:
            rows.append(Row((S(d),), (S(d + new, cut=Repeated(repeats[d + new])),), traffic=_traffic(call)))
    return rows + any_partial(1, 1)


def _repeat_local(decided: LocalCall) -> LocalFunction | None:
    """Repeat whole dims locally, then fetch the ranges of the cut ones."""
    call, (source,), (target,) = decided.call, decided.inputs, decided.outputs
    repeats = [int(n) for n in call["repeats"]]
    new = len(repeats) - source.ndim
    cut = [d for d in range(source.ndim) if source.cuts[d].axes and repeats[d + new] > 1]
    if not cut:
        return None
    moves: list[Callable[[Tensor], Tensor]] = []
    before = source
    for d in cut:
        n, placed = source.shape[d], target.cuts[d + new].placements(d)
        shape = tuple(n * repeats[d + new] if k == d else size for k, size in enumerate(before.shape))
        placements = [placed.get(axis, placement) for axis, placement in enumerate(before.placements)]
        after = before.with_(shape=shape, placements=placements, shard_order=source.shard_order)
        moves.append(relocate(d, before, after, [Run(0, i * n, n) for i in range(repeats[d + new])]))
        before = after
    rest = [1 if i - new in cut else n for i, n in enumerate(repeats)]

    def run(x: Tensor, repeats: Sequence[int]) -> Tensor:
        for move in moves:
            x = move(x)
        return x.repeat(rest)

    return filling_out(call, run)


SHIFT: Table = family(
    {
        "roll flip": Rule(_shift_rows, _shift_local),
        "rot90": Rule(_rot90_rows),
        "repeat": Rule(_repeat_rows, _repeat_local),
    }
)
