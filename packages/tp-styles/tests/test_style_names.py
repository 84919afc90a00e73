"""Covers: plan/style_names.py."""

from __future__ import annotations

import pytest

from shoal_tp_styles import ColwiseParallel, PlanError, RowwiseParallel
from shoal_tp_styles.plan.resolve import resolve
from shoal_tp_styles.plan.style_names import REFUSED, style_named
from shoal_tp_styles.testing import MLP


def test_names_are_styles() -> None:
    uses = resolve(MLP(), {"net1": "colwise", "net2": "rowwise"}).uses
    assert [use.style for use in uses] == [ColwiseParallel(), RowwiseParallel()]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_to_do(name: str) -> None:
    with pytest.raises(PlanError, match=rf"style '{name}': .*(use moe_tp_experts|write a style)"):
        style_named(name)


def test_a_name_counts_where_its_entry_matches() -> None:
    """A family's plan names experts that a dense configuration lacks."""
    resolved = resolve(MLP(), {"net1": "colwise", "experts": "packed_rowwise"})
    assert len(resolved.uses) == 1 and "'experts' matches no module" in resolved.unmatched[0]


def test_names_of_earlier_releases_are_known() -> None:
    names = "colwise rowwise colwise_rep rowwise_rep local_colwise local_rowwise gather replicate sequence_parallel"
    for name in names.split():
        style_named(name)
