"""Bugs of public reports are named.

Covers: certify.py, certification.py, shrinking.py, analysis, observe.
"""

from __future__ import annotations

import pytest

from bug_table import HAND_WRITTEN, SHOAL, Bug, names_bug
from shoal_lab import certify

# One of each family runs in the fast suite.
FAST = {
    "no_reduce_after_row_parallel",
    "latent_rope_rows_not_reduced",
    "tied_embedding_of_stages_not_reduced",
    "divided_by_the_world",
    "accumulation_reduced_each_time",
    "mean_of_uneven_tokens",
    "stale_gathered_weights",
    "resumed_state_in_another_order",
    "clipped_by_local_norm",
    "dropout_alike_on_data_ranks",
    "mask_off_by_a_block",
    "tokens_dropped_by_experts",
    "sharded_sum_not_scaled_up",
}


def as_param(bug: Bug) -> object:
    name = bug.program.__name__
    return pytest.param(bug, id=name, marks=() if name in FAST else pytest.mark.slow)


@pytest.mark.parametrize("bug", [as_param(bug) for bug in (*HAND_WRITTEN, *SHOAL)])
def test_a_bug_is_named_with_its_parameter_and_axes(bug: Bug) -> None:
    report = certify(bug.program, meshes=[bug.mesh])
    assert not report.passed
    assert names_bug(report, bug), str(report)
    assert f"certify({bug.program.__name__}, meshes=[" in report.smallest


def test_the_table_has_forty_bugs() -> None:
    names = {bug.program.__name__ for bug in (*HAND_WRITTEN, *SHOAL)}
    assert len(names) == len(HAND_WRITTEN) + len(SHOAL) >= 40
    assert names >= FAST
