"""A fair sample of `module_sweep.py`.

It is one sample of every tenth entry of torch's databases of modules and optimizers.

Which tenth, is `MODULE_SWEEP_TURN` (0 to 9); ten turns try every entry.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("expecttest", reason="torch's databases need it")

from integration_tests.case_runner import run_cases
from integration_tests.module_cases import modules, optimizers, verdict
from integration_tests.module_sweep import bad, cases_of, page

TURN, TURNS = int(os.environ.get("MODULE_SWEEP_TURN", "3")), 10
NAMES = [*modules(), *optimizers()][TURN::TURNS]


def test_a_sample_is_right_or_refused() -> None:
    cases = [case for name in NAMES for case in cases_of(name, most=1)]
    outcomes = dict(zip(cases, run_cases(verdict, cases), strict=True))
    assert not bad(outcomes), "\n".join(
        f"{case}: {outcome}" for case, outcome in bad(outcomes).items()
    )


def test_the_page_counts_and_names_what_is_not_right() -> None:
    first, second, third, *_ = cases_of("nn.Linear")
    text = page({first: "", second: "refused: PlanError: no", third: "wrong: output 0"})
    assert (
        "**1 of 3 cases right, 1 refused by a typed error on all ranks alike, 1 neither.**" in text
    )
    assert "| nn.Linear | 1/3 |" in text
    assert "wrong: output 0" in text.partition("Neither right nor refused")[2]
