"""`validate`: every row of an operator's rule against brute force, on plain tensors and without process groups.

A row claims: inputs with these placements along a mesh axis give outputs with those.  The claim is tried for several
axis sizes and shardings (even, uneven, ragged, with empty shards) and for pairs of rows on two axes, those that shard
one dim together among them: `trial.py` runs one such case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

from ..dispatch.assign import is_plain
from ..layout.dim_sharding import DimSharding, chunk_sizes
from ..layout.placements import Partial
from ..layout.strided_dim import AnyDimSharding, fold_levels
from ..rules.all_rules import TABLE
from ..rules.language.rule import Entry, Row, Rule, S
from .trial import Kernel, Report, Trial, format_call, format_rows


def validate(
    op: Any,
    *args: Any,
    rule: Rule | None = None,
    ways: Sequence[int] = (2, 3, 4),
    pairs: bool = True,
    exact: bool = True,
    kernel: Kernel = None,
    **kwargs: Any,
) -> Report:
    """Check every row that a rule gives for one call.

    Args:
        op: an operator overload.
        args: its global arguments.
        rule: the rule; that of the standing tables when left out.
        ways: sizes of the mesh axis to try.
        pairs: whether to try pairs of rows on a 2 x 2 mesh too.
        exact: False compares shapes and dtypes only (operators whose values are undefined).
        kernel: what computes the operator where it has no kernel for this device.
        kwargs: its keyword arguments.

    Example:
        >>> import torch
        >>> validate(torch.ops.aten.relu.default, torch.randn(5, 2)).wrong
        []
    """
    trial = Trial(op, args, kwargs, rule or TABLE[op], exact=exact, kernel=kernel)
    report = Report()
    for row in trial.rows:
        cases = [(n, sharding) for n in ways for sharding in _shardings(trial, row, (n,))]
        used = [trial.try_out(report, (n,), (row,), {0: sharding}) for n, sharding in cases]
        if row.communicates and cases and not any(used):
            report.idle.append(
                f"{op} {format_call(trial.call)} {format_rows((row,))}: declares traffic, starts no collective"
            )
    for first, second in product(trial.rows, trial.rows) if pairs else ():
        for shardings in _pair_shardings(trial, first, second):
            trial.try_out(report, (2, 2), (first, second), shardings)
    return report


def _shardings(
    trial: Trial, row: Row, shape: tuple[int, ...], axes: tuple[int, ...] = (0,)
) -> Iterator[AnyDimSharding | None]:
    """Shardings of a row's factor: as torch.chunk does, ragged, with empty shards, everything on one coordinate."""
    steps = trial.steps(row)
    if steps is None:
        yield None
        return
    n = prod(shape)
    first = min(steps, steps // 2 | 1)  # odd, so that windows of an even stride cross the border
    sizes = [chunk_sizes(steps, n), (*(0,) * (n - 1), steps), (first, *(0,) * (n - 2), steps - first)]
    for one in dict.fromkeys(sizes):
        if len(set(one)) == 1 or not row.even:
            yield DimSharding(axes, shape, one)
    if trial.rule.unordered and is_plain(row) and trial.rule.kind != "each" and not row.even and steps % 2 == 0:
        yield fold_levels({2: DimSharding(axes, shape, chunk_sizes(steps // 2, n))}, steps)


def _pair_shardings(trial: Trial, first: Row, second: Row) -> Iterator[dict[int, AnyDimSharding | None]]:
    if first is second:
        for sharding in _shardings(trial, first, (2, 2), (0, 1)):
            yield {0: sharding, 1: sharding}
    elif not _mix(first, second):
        shardings = [[*_shardings(trial, row, (2,), (axis,))] for axis, row in enumerate((first, second))]
        if _meet(first, second):  # what fits together there depends on both
            shardings = [[*of_row, *_on_the_first(of_row)] for of_row in shardings]
        for one, other in product(*shardings) if _meet(first, second) else zip(*shardings, strict=False):
            yield {0: one, 1: other}


def _mix(first: Row, second: Row) -> bool:
    """Whether two rows ask for reductions of two kinds, which do not commute."""
    return any(isinstance(a, Partial) and isinstance(b, Partial) and a != b for a, b in _pairs(first, second))


def _meet(first: Row, second: Row) -> bool:
    """Whether two rows shard one dim of an operand."""
    return any(isinstance(a, S) and isinstance(b, S) and a.dim == b.dim for a, b in _pairs(first, second))


def _pairs(first: Row, second: Row) -> Iterator[tuple[Entry, Entry]]:
    return zip(first.inputs + first.outputs, second.inputs + second.outputs, strict=True)


def _on_the_first(shardings: Sequence[AnyDimSharding | None]) -> Iterator[DimSharding]:
    """Everything on the first coordinate."""
    for sharding in shardings[:1]:
        if isinstance(sharding, DimSharding) and sharding.length:
            yield DimSharding(sharding.axes, sharding.axis_sizes, (sharding.length, *(0,) * (len(sharding.sizes) - 1)))
