"""A sample of `verify_sweep.py`: what `verify` says without ranks is what happens on ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from integration_tests.architectures import Case
from integration_tests.verify_sweep import Outcome, page, sweep


@pytest.mark.parametrize("name", ["olmo2", "gpt2"])
def test_a_sample_is_what_verify_says(name: str) -> None:
    outcomes = sweep([name])
    assert len(outcomes) >= 2
    assert {outcome.name for outcome in outcomes.values()} <= {"fits, right", "refuted, does not fit"}


def test_the_page_counts_false_verdicts() -> None:
    cases = {
        Case("llama", "own", 2): Outcome("fits", ""),
        Case("llama", "own", 4): Outcome("fits", "wrong: logits"),
        Case("opt", "names", 4): Outcome("refuted: wrong: output 0", ""),
    }
    text = page(cases)
    assert '**2 architectures, 3 plans; 1 false "fits".**' in text
    assert "| llama | fits, *false fits* |  |  |" in text
    assert "| opt |  | *refuted, right* |  |" in text
    assert "- opt, names: refuted: wrong: output 0" in text
