"""Every rank holds some hidden features of all experts; against one device, in float64.

Covers: expert_forward.py.
"""

from __future__ import annotations

import copy

import pytest

from moe_checks import assert_same_on_replicas
from moe_models import mixture
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import ExpertTensorParallel, parallelize_module


@on_ranks(4)
@pytest.mark.parametrize("kind", ["packed", "transposed", "listed", "sorted"])
def test_ranks_hold_hidden_features_of_all_experts(kind: str) -> None:
    single = mixture(kind, 3)
    module = copy.deepcopy(single)
    parallelize_module(module, all_ranks(), {"experts": ExpertTensorParallel()})
    assert_same_on_replicas(module, single)
