"""Covers: styles/prepare.py: shards of inputs that are saved for backward."""

from __future__ import annotations

import copy
import gc
from typing import Any
from weakref import ref

import torch
from torch import nn

from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    RowwiseParallel,
    input_reshard,
    parallelize_module,
)


@on_ranks(4)
def test_input_reshard_saves_a_shard_and_keeps_gradients() -> None:
    axis = all_ranks()
    single: Any = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)).double()
    module: Any = copy.deepcopy(single)
    parallelize_module(module, axis, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    input_reshard(module, axis, 0)
    for rows in (8, 6):
        full = torch.randn(rows, 8, dtype=torch.double)
        x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
        single.zero_grad()
        module.zero_grad()
        single(x).square().sum().backward()
        out = module(y)
        with CommDebugMode() as mode:
            out.square().sum().backward()
        assert mode.get_comm_counts()[torch.ops._c10d_functional.all_gather_into_tensor] == 1
        torch.testing.assert_close(y.grad, x.grad)
        for param, expected in zip(module.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    assert input_reshard(single, axis) is single and not single._forward_pre_hooks


def test_a_forward_without_a_backward_is_freed() -> None:
    """A node that saved its own output would hold itself, unseen by Python's garbage collector."""
    with fake_world(4):
        module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        input_reshard(module, init_device_mesh("cpu", (4,)), 0)
        weight = ref(module[0].weight)
        module(torch.ones(8, 8))
        del module
        gc.collect()
        assert weight() is None
