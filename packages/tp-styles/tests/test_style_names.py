"""Covers: plan/style_names.py."""

from __future__ import annotations

import pytest

from shoal_dtensor import Partial, Replicate
from shoal_tp_styles import (
    ColwiseParallel,
    PlanError,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from shoal_tp_styles.internal import resolve
from shoal_tp_styles.plan.style_names import REFUSED, style_named
from small_models import MLP


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


EARLIER = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    "local_colwise": ColwiseParallel(),
    "local_rowwise": RowwiseParallel(),
    "gather": PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
    "replicate": None,
    "sequence_parallel": SequenceParallel(use_local_output=True),
}


@pytest.mark.parametrize("name", EARLIER)
def test_names_of_earlier_releases_are_known(name: str) -> None:
    assert style_named(name) == EARLIER[name]
