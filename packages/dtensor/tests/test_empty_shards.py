"""Covers: rules/language/rule.py: ranks without elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal_dtensor.rules import OpCall, P, Row, Rule, S
from shoal_dtensor.testing import validate

aten = torch.ops.aten


def refusing(x: Any, *args: Any) -> Any:
    raise AssertionError("the operator runs on an empty shard")


@pytest.mark.parametrize(
    ("reduce", "dtype"),
    [
        *((op, dtype) for op in ("sum", "product") for dtype in (torch.float32, torch.int64)),
        *(
            (op, dtype)
            for op in ("max", "min")
            for dtype in (torch.float32, torch.int8, torch.uint8, torch.bool)
        ),
    ],
)
def test_a_rank_without_elements_contributes_what_changes_no_reduction(
    reduce: str, dtype: torch.dtype
) -> None:
    ops = {
        "sum": aten.sum.dim_IntList,
        "max": aten.amax.default,
        "min": aten.amin.default,
        "product": aten.prod.dim_int,
    }
    x = torch.tensor([[1, 2], [3, 4], [5, 6]]).to(dtype)
    dim: Any = 0 if reduce == "product" else [0]

    def rows(call: OpCall) -> list[Row]:
        return [call.row(self=S(0), out=P(reduce))]

    kwargs: dict[str, Any] = {"dtype": dtype} if reduce in ("sum", "product") else {}
    report = validate(
        ops[reduce], x, dim, rule=Rule(rows, skip_empty=True), ways=(2, 4, 5), pairs=False, **kwargs
    )
    assert report.checked >= 8
    assert report.wrong == []


def test_the_operator_does_not_run_on_an_empty_shard() -> None:
    def rows(call: OpCall) -> list[Row]:
        return [call.row(self=S(0), out=S(0))]

    def local(local_call: Any) -> Any:
        return refusing if 0 in local_call["self"].local_shape else None

    x = torch.randn(3, 4, 4)
    wrong = validate(
        aten.matrix_exp.default, x, rule=Rule(rows, local), ways=(4,), pairs=False
    ).wrong
    assert "runs on an empty shard" in wrong[0]
    report = validate(
        aten.matrix_exp.default, x, rule=Rule(rows, local, skip_empty=True), ways=(4,), pairs=False
    )
    assert (report.checked >= 3, report.wrong) == (True, [])


def test_a_row_that_communicates_runs_on_every_rank() -> None:
    ran = []

    def rows(call: OpCall) -> list[Row]:
        return [call.row(self=S(0), out=S(0), traffic=lambda ranks: 8 * ranks)]

    def local(local_call: Any) -> Any:
        ran.append(local_call["self"].local_shape)

    validate(
        aten.relu.default,
        torch.randn(3),
        rule=Rule(rows, local, skip_empty=True),
        ways=(4,),
        pairs=False,
    )
    assert (0,) in ran
