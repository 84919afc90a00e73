"""Covers: programs that pass the checker compute the result of one process.

Planted faults are rejected.
"""

from __future__ import annotations

from random_typed_programs import KINDS, OPERATORS, try_programs


def test_programs_that_pass_are_right_and_programs_with_a_fault_do_not_pass() -> None:
    # 2,000 by hand: python packages/spmd-types/tests/support/random_typed_programs.py
    outcome = try_programs(40, seed=17)
    assert outcome.programs == 40
    assert outcome.wrong == []
    assert outcome.faults == 40
    assert outcome.missed == []
    assert sum(outcome.rejected.values()) >= 20
    assert {*outcome.rejected} <= {*KINDS}
    assert len({*outcome.operators} & {*OPERATORS}) >= 20
