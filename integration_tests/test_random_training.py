"""Covers: random_training: random steps under data parallelism on four ranks have the results of one device."""

from __future__ import annotations

import pytest
from integration_tests.case_runner import kind, run_cases
from integration_tests.random_training import compose, verdict


@pytest.mark.parametrize(
    "first", [0, 25, *(pytest.param(n, marks=pytest.mark.slow) for n in range(50, 200, 25))]
)
def test_programs_are_what_they_are_on_one_device(first: int) -> None:
    programs = [compose(seed) for seed in range(first, first + 25)]
    outcomes = {
        program.seed: outcome
        for program, outcome in zip(programs, run_cases(verdict, programs), strict=True)
    }
    assert {
        seed: outcome for seed, outcome in outcomes.items() if kind(outcome) not in ("", "void")
    } == {}
    assert sum(kind(outcome) == "void" for outcome in outcomes.values()) < 5
