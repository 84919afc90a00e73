"""Which rows a rule lacks: shardings that the bare operator satisfies."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

from shoal_dtensor import Partial
from shoal_dtensor.layout.dim_sharding import DimSharding, chunk_sizes
from shoal_dtensor.rules import Entry, R, Row, Rule, S
from shoal_dtensor.rules.all_rules import TABLE
from shoal_dtensor.testing.validate import CallTrial, Report

__all__ = ["missed_rows"]

MOST = 300  # combinations of input entries to try
NO_ROWS = Rule(lambda call: [])


def missed_rows(
    op: Any, *args: Any, rule: Rule | None = None, ways: int = 2, **kwargs: Any
) -> list[Row]:
    """Shardings of inputs and outputs that an operator satisfies on `ways` ranks but no row says.

    Information, not an error: a sharding may be right for these arguments alone.
    """
    trial, bare = (
        CallTrial(op, args, kwargs, rule or TABLE[op]),
        CallTrial(op, args, kwargs, NO_ROWS),
    )
    known = {(row.inputs, row.outputs) for row in trial.rows}
    options: list[list[Entry]] = [[R, *(S(d) for d in range(t.ndim))] for t in trial.tensors]
    made: list[list[Entry]] = [
        [R, Partial("sum"), *(S(d) for d in range(t.ndim))] for t in trial.call.outputs
    ]
    if prod(map(len, options)) > MOST:
        return []
    found = []
    for inputs, outputs in product(product(*options), product(*made)):
        row = Row(inputs, outputs)
        steps = trial.steps(row)
        if (row.inputs, row.outputs) in known or steps is None or steps < ways:
            continue
        report = Report()
        bare.try_out(
            report, (ways,), (row,), {0: DimSharding((0,), (ways,), chunk_sizes(steps, ways))}
        )
        if report.checked and not report.wrong:
            found.append(row)
    return found
