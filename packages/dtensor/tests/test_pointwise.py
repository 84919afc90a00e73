"""Covers: rules/math/pointwise.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_dtensor import Partial, TensorMeta
from shoal_dtensor.rules import OpCall, P, Row, flatten
from shoal_dtensor.rules.math.pointwise import POINTWISE

aten = torch.ops.aten
EXTREMA = {"max": torch.maximum, "min": torch.minimum}
DTYPES = [torch.int8, torch.uint8, torch.int64, torch.float32]


def corners(dtype: torch.dtype) -> list[float]:
    """Values where arithmetic wraps, overflows or is undefined."""
    if dtype.is_floating_point:
        return [-torch.inf, -3.5, -1.0, 0.0, 0.5, 1.0, torch.inf]
    info = torch.iinfo(dtype)
    return [
        info.min,
        info.min + 1,
        *([-2, -1] if info.min else []),
        0,
        1,
        100,
        info.max - 1,
        info.max,
    ]


def meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def calls(op: Any, dtype: torch.dtype) -> Iterator[tuple[OpCall, list[torch.dtype]]]:
    """A call with a tensor for every operand, and with a number for the last one.

    They are the calls that the operator takes.
    """
    arguments = [a for a in op._schema.arguments if not a.has_default_value()]
    count = len([a for a in arguments if "Tensor" in str(a.type)])
    for dtypes in ([dtype] * count, [torch.bool] + [dtype] * (count - 1)):
        tensors = iter([torch.ones(2, dtype=kind) for kind in dtypes])
        args = [next(tensors) if "Tensor" in str(a.type) else 1 for a in arguments]
        try:
            outputs = tuple(meta(t) for t in flatten([op(*args)]))
        except (
            RuntimeError,
            NotImplementedError,
            TypeError,
            ValueError,
            UserWarning,
        ):  # 2.15 warns of what it will drop
            continue
        metas = tuple(meta(a) if isinstance(a, Tensor) else a for a in args)
        read = tuple(a for a in metas if isinstance(a, TensorMeta))
        yield OpCall(op, metas, {}, read, outputs), list(dtypes)


def holds(call: OpCall, dtypes: list[torch.dtype], row: Row) -> bool:
    """Whether reducing operands of two ranks, and reducing results, gives the same.

    All corner values are compared.
    """
    choices = []
    for entry, dtype in zip(row.inputs, dtypes, strict=True):
        values = [0, 1] if dtype == torch.bool else corners(dtype)
        choices.append(
            [*product(values, values)] if isinstance(entry, Partial) else [(v, v) for v in values]
        )
    columns = [*zip(*product(*choices), strict=True)]
    ranks = [
        [torch.tensor([pair[r] for pair in c]).to(d) for c, d in zip(columns, dtypes, strict=True)]
        for r in (0, 1)
    ]

    def result(operands: list[Tensor]) -> Tensor:
        following = iter(operands)
        out: Tensor = call.op(
            *(next(following) if isinstance(a, TensorMeta) else a for a in call.args)
        )
        return out

    reduced = [
        EXTREMA[entry.reduce_op](a, b) if isinstance(entry, Partial) else a
        for entry, a, b in zip(row.inputs, *ranks, strict=True)
    ]
    (entry,) = row.outputs
    assert isinstance(entry, Partial)
    combined = EXTREMA[entry.reduce_op](result(ranks[0]), result(ranks[1]))
    return torch.equal(combined.nan_to_num(7.25), result(reduced).nan_to_num(7.25))


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_extrema_pass_only_operators_that_keep_their_order(dtype: torch.dtype) -> None:
    wrong, checked = [], 0
    for op, rule in POINTWISE.items():
        if rule.kind == "each" or op._schema.is_mutable:
            continue
        for call, dtypes in calls(op, dtype):
            for row in rule.rows_of(call):
                if any(entry in (P("max"), P("min")) for entry in row.inputs):
                    checked += 1
                    if not holds(call, dtypes, row):
                        wrong.append(f"{op} {dtypes} {row.inputs} -> {row.outputs}")
    assert checked > 20
    assert wrong == []


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar])
def test_sums_with_partial_extrema_are_reduced_first(op: Any) -> None:
    """In int8, a partial maximum of 100 plus 50 is -106 on the rank that has it."""
    x = TensorMeta((4,), (1,), torch.int8)
    other = 50 if op is aten.add.Scalar else x
    call = OpCall(op, (x, other), {}, (x,) if other == 50 else (x, x), (x,))
    assert all(
        P(extremum) not in row.inputs
        for row in POINTWISE[op].rows_of(call)
        for extremum in ("max", "min")
    )
