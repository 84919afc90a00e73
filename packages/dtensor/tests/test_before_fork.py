"""Covers: before_fork.py: forked ranks share the parts of a first use that change nothing else."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from shoal_dtensor import Shard, Spec, distribute_tensor
from shoal_dtensor.before_fork import register_operators
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import lab


def use_a_dtensor() -> tuple[bool, bool, int, list[float]]:
    """Return the state of a new rank, and the local part of a sum."""
    is_registered = register_operators.cache_info().currsize == 1
    has_rules = "shoal_dtensor.rules.all_rules" in sys.modules
    # the parts that change torch for all tensors
    left = len(Spec.on_first_use)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor: Any = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return is_registered, has_rules, left, (tensor + tensor).to_local().tolist()


def test_ranks_are_forked_with_registered_operators_and_rules() -> None:
    (first, second) = lab(2).run(use_a_dtensor)
    assert first[:2] == second[:2] == (True, True)
    assert first[2] == second[2] > 5
    assert first[3] == [0.0, 2.0]
    assert second[3] == [4.0, 6.0]
