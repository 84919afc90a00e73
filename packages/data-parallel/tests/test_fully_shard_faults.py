"""A rank alone that raises in a step of `fully_shard` or `replicate`, and the step after.

The tests run on ranks of their own.

Covers: unit_passes.py, gradient_buckets.py.
"""

from __future__ import annotations

import pytest

from lone_faults import outlive_a_fault
from shoal_mesh import launch


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["fully_shard", "replicate", "replicate, sharded state"])
def test_the_other_ranks_end_too_and_nothing_has_changed(kind: str, where: str) -> None:
    ended_by_fault = launch(outlive_a_fault, 2, kind, where, timeout=120)
    assert ended_by_fault == [False, True]
