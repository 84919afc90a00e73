"""Weights of a training mesh in a serving mesh of other degrees.

Covers: running/copy_weights.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal_dtensor import communication
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import Heads, PackedColwiseParallel, PlanError, parallelize_module
from shoal_transfer import copy_weights
from shoal_transfer.manifest.weights import weights_of


def build(seed: int, features: int = 10) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, features), nn.ReLU(), nn.Linear(features, 6)).double()


SPLIT = PackedColwiseParallel(blocks={"q": Heads(4, 2), "k": Heads(1, 1), "v": Heads(1, 1)})
PLANS: dict[str, Any] = {
    "colwise": {"0": "colwise", "2": "rowwise"},
    "rowwise": {"0": "rowwise_rep", "2": "colwise_rep"},
    "packed": {"0": PackedColwiseParallel(blocks=2)},
    "split": {"0": SPLIT},
    "plain": {},
}


def assert_equal(target: Any, expected: Any) -> None:
    """What every rank holds is its part of the values: saved boxes compare without gathering."""
    state = expected.state_dict()
    weights = weights_of(target)
    assert {weight.name for weight in weights} == state.keys()
    for weight in weights:
        for held in weight.boxes():
            values = state[weight.name][tuple(slice(*bounds) for bounds in held.box)]
            assert torch.equal(held.view, values), weight.name


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("to", PLANS)
@pytest.mark.parametrize("of", PLANS)
@pytest.mark.parametrize("batch", [1, 2**20])
def test_any_plan_into_any_other(of: str, to: str, batch: int) -> None:
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    source, target = build(0), build(1)
    if PLANS[of]:
        parallelize_module(source, pairs["tp"], PLANS[of])
    if PLANS[to]:
        parallelize_module(target, all_ranks(), PLANS[to])
    with communication("forbid"):  # nothing is gathered or redistributed
        copy_weights(source, target, max_bytes=batch)
    assert_equal(target, build(0))


@on_ranks(2, timeout=200)
def test_models_that_differ_are_refused_on_all_ranks() -> None:
    with pytest.raises(
        PlanError, match=r"'0.weight' is \(12, 4\) in the mapping, but the source has \(10, 4\)"
    ):
        copy_weights(build(0), build(1, features=12) if dist.get_rank() else None)
    with pytest.raises(PlanError, match=r"'x.weight' is .* the source has no such tensor"):
        copy_weights(build(0), nn.ModuleDict({"x": nn.Linear(1, 1)}))
