"""Covers: redistribute/steps.py: steps and plans as data, and as text."""

from __future__ import annotations

import pytest

from shoal_dtensor import Partial, Placement, Replicate, Shard, Spec
from shoal_dtensor.redistribute.execution.rank_steps import _RANK_STEPS
from shoal_dtensor.redistribute.plan import plan
from shoal_dtensor.redistribute.steps import _COMMUNICATING, Plan
from shoal_mesh import abstract_mesh

MESH = abstract_mesh((4,), ("tp",))
S0, S1, R, SUM = Shard(0), Shard(1), Replicate(), Partial()


def between(src: Placement, dst: Placement, rows: int = 1024) -> Plan:
    return plan(Spec(MESH, (src,), (rows, 1024)), Spec(MESH, (dst,), (rows, 1024)))


@pytest.mark.parametrize(
    ("src", "dst", "line"),
    [
        (S0, R, "AllGather over (tp) dims [0]"),
        (SUM, R, "AllReduce over (tp) sum"),
        (Partial("avg"), S0, "ReduceScatter over (tp) avg dims [0]"),
        (S0, S1, "AllToAll over (tp) dim 0 -> 1"),
        (R, S1, "Slice over (tp)  local"),
        (R, SUM, "MakePartial over (tp)  local"),
    ],
)
def test_a_step_in_one_line(src: Placement, dst: Placement, line: str) -> None:
    (step,) = between(src, dst).steps
    assert step.line().startswith(line)
    assert step.communicates is not step.line().endswith("local")


def test_a_plan_counts_its_collectives_and_says_whether_its_result_is_a_slice() -> None:
    nothing, gather, slicing = between(S0, S0), between(S0, R), between(R, S0)
    assert (nothing.collectives, gather.collectives, slicing.collectives) == (0, 1, 0)
    assert (nothing.slices, gather.slices, slicing.slices) == (True, False, True)
    assert str(nothing) == "[S(0)] -> [S(0)]: nothing to do"
    assert str(gather).splitlines()[0].startswith("[S(0)] -> [R]: 3.0 MiB, ")


def test_every_kind_of_step_has_a_kernel() -> None:
    local = {"Slice", "MakePartial", "Reshape", "Scale"}
    assert set(_RANK_STEPS) - _COMMUNICATING == local
