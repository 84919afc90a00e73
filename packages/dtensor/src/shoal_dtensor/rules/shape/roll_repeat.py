"""Sharding of operators that shift, reverse or repeat whole dims: roll, flip, rot90, repeat.

Along a sharded dim, each rank sends exactly the ranges that others need; the result is sharded as the input is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal_mesh.internal import dataclass

from ...layout.dim_sharding import DimSharding
from ..exchange.ranges import Relocation, Run, intervals
from ..language.local_ops import bytes_of, in_every_form
from ..language.rule import LocalCall, LocalFunction, OpCall, Row, Rule, S, Table, Traffic
from ..language.rule_tables import family
from .slice_maps import chunk_sharding
from .views import same_dims

aten: Any = torch.ops.aten


def _a_shard(call: OpCall) -> Traffic:
    """A rank receives at most its shard of the result."""
    return lambda ranks: bytes_of(call.outputs[0]) / ranks


# --- roll and flip ----------------------------------------------------------------------------------------------------


def _runs(call: OpCall) -> dict[int, tuple[Run, ...]]:
    """For every dim that roll or flip rearranges, where its positions come from."""
    source = call["self"]
    if call.get("shifts") is None:
        lengths = {int(d) % max(source.ndim, 1): source.shape[d] for d in call["dims"]} if source.ndim else {}
        return {d: (Run(n - 1, 0, n, back=True),) for d, n in lengths.items()}
    total: dict[int, int] = {}
    for d, shift in zip(call["dims"], call["shifts"], strict=True):
        total[int(d) % source.ndim] = total.get(int(d) % source.ndim, 0) + int(shift)
    turns = {d: shift % max(source.shape[d], 1) for d, shift in total.items()}
    return {d: (Run(0, k, source.shape[d] - k), Run(source.shape[d] - k, 0, k)) for d, k in turns.items()}


def _rolls_flattened(call: OpCall) -> bool:
    return call.get("shifts") is not None and not call["dims"]


def roll(call: OpCall) -> Iterator[Row]:
    if not _rolls_flattened(call):
        moving = _runs(call)
        yield from same_dims(call, ((d, d) for d in range(call["self"].ndim) if d not in moving))
        yield from (call.row(self=S(d), out=S(d), traffic=_a_shard(call)) for d in moving)
    yield from call.keeping_partials("self")


def _roll(local_call: LocalCall) -> LocalFunction | None:
    """Rearrange the other dims locally and the sharded ones between ranks; dims are independent of each other."""
    call, source, target = local_call.call, local_call["self"], local_call.outputs[0]
    if _rolls_flattened(call):
        return None
    runs = _runs(call)
    sharded = [d for d in runs if source.dim_shardings[d].axes]
    if not sharded:
        return None
    moves = [Relocation(source, d, intervals(target.dim_sharding(d)), runs[d]) for d in sharded]
    local = [i for i, d in enumerate(call["dims"]) if int(d) % source.ndim not in sharded]
    dims = [call["dims"][i] for i in local]
    shifts = None if call.get("shifts") is None else [call["shifts"][i] for i in local]

    def run(x: Tensor, *args: object) -> Tensor:
        if dims:
            x = aten.flip.default(x, dims) if shifts is None else aten.roll.default(x, shifts, dims)
        for move in moves:
            x = move.forwards(x)
        return x

    return in_every_form(call, run)


def rot90(call: OpCall) -> Iterator[Row]:
    ndim = call["self"].ndim
    turned = {int(d) % ndim for d in call["dims"]}
    yield from same_dims(call, ((d, d) for d in range(ndim) if d not in turned))
    yield from call.keeping_partials("self")


# --- repeat -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RepeatMap:
    """A dim that became `times` as long, in the shards of `torch.chunk`."""

    times: int

    def __call__(self, sharding: DimSharding) -> DimSharding:
        return chunk_sharding(sharding.length * self.times, sharding)


def repeat(call: OpCall) -> Iterator[Row]:
    repeats, ndim = call["repeats"], call["self"].ndim
    new = len(repeats) - ndim
    yield from same_dims(call, ((d, d + new) for d in range(ndim) if repeats[d + new] == 1))
    for d in range(ndim):
        if repeats[d + new] > 1:
            repeated = S(d + new, map=RepeatMap(repeats[d + new]))
            yield call.row(self=S(d), out=repeated, traffic=_a_shard(call))
    yield from call.keeping_partials("self")


def _repeat(local_call: LocalCall) -> LocalFunction | None:
    """Fetch the ranges of the sharded dims, then repeat the others locally."""
    call, source, target = local_call.call, local_call["self"], local_call.outputs[0]
    repeats = [int(n) for n in call["repeats"]]
    new = len(repeats) - source.ndim
    sharded = [d for d in range(source.ndim) if source.dim_shardings[d].axes and repeats[d + new] > 1]
    if not sharded:
        return None
    runs = {d: [Run(0, i * n, n) for i in range(repeats[d + new])] for d, n in enumerate(source.shape)}
    moves = [Relocation(source, d, intervals(target.dim_sharding(d + new)), runs[d]) for d in sharded]
    rest = [1 if i - new in sharded else n for i, n in enumerate(repeats)]

    def run(x: Tensor, repeats: Sequence[int]) -> Tensor:
        for move in moves:
            x = move.forwards(x)
        return x.repeat(rest)

    return in_every_form(call, run)


ROLL_REPEAT: Table = family({"roll flip": Rule(roll, _roll), "rot90": Rule(rot90), "repeat": Rule(repeat, _repeat)})
