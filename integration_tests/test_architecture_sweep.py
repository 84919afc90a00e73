"""A sample of `architecture_sweep.py`: plans against one process, and the page.

The plans are for architectures of transformers.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from integration_tests.architecture_sweep import Outcome, page, sweep
from integration_tests.architectures import Case


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_sample_is_right_by_every_plan(name: str) -> None:
    outcomes = sweep(name)
    assert len(outcomes) >= 2
    assert {outcome.name for outcome in outcomes.values()} == {"right"}
    shares = [
        float(each.happened.partition(":")[2]) for case, each in outcomes.items() if case.ways == 4
    ]
    assert all(share < 0.3 for share in shares)


def test_the_page_counts_architectures() -> None:
    cases = {
        Case("llama", "own", 2): Outcome("fits", "right: 0.511"),
        Case("llama", "own", 4): Outcome("fits", "wrong: logits"),
        Case("opt", "auto", 4): Outcome(
            "refuted: wrong: output 0", "right: 0.3", {"a.*.b": "small"}
        ),
        Case("opt", "peer", 4): Outcome("fits", "error: ValueError: no plan"),
    }
    text = page(cases)
    assert "own (the model's own `tp_plan`): 0 right, 0 refused, 1 wrong" in text
    assert "| llama | 51%, **wrong** |  |  |" in text
    assert "| opt |  | *refused* | *refused* |" in text
    assert "- opt, auto, 4 ranks: refuted: wrong: output 0" in text
    assert "- opt, peer, 4 ranks: error: ValueError: no plan" in text
    assert "- small: `opt: a.*.b`" in text
