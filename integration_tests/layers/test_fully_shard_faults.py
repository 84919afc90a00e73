"""A rank alone that raises in a step of a model with units and styles, and the step after.

The tests run on ranks of their own.

Covers: shoal_data_parallel/units/unit_passes.py.
"""

from __future__ import annotations

import pytest
from integration_tests.layers.styled_model import styled

from lone_faults import outlive_a_fault
from shoal_mesh import launch


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_other_ranks_end_too_and_nothing_has_changed(where: str) -> None:
    ended_by_fault = launch(outlive_a_fault, 4, "fully_shard", where, styled, timeout=120)
    assert ended_by_fault == [False, True, False, False]
