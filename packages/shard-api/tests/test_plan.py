"""Planners.  Covers: module/plan.py."""

from __future__ import annotations

import copy

import torch
from torch import nn

from sharded_modules import MLP
from sharding_cases import chunk
from shoal_mesh.testing import on_ranks
from shoal_shard_api import (
    ShardingPlan,
    ShardingPlanner,
    shard_module,
)


@on_ranks(4)
def test_nested_modules_and_a_planner() -> None:
    class Rows(ShardingPlanner):
        def build_plan(self, module: nn.Module) -> ShardingPlan:
            return ShardingPlan(plan={name: chunk(0) for name, p in module.named_parameters() if p.dim() == 2})

    model = nn.Sequential(MLP(), nn.Sequential(MLP()))
    alone = copy.deepcopy(model)
    shard_module(model, Rows().build_plan(model))
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x).full_tensor(), alone(x))
