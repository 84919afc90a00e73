"""Covers: apply/apply.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
    unparallelize_module,
)
from shoal_tp_styles.testing import all_ranks
from tp_checks import assert_same_gradients


@on_ranks(4)
def test_uneven_features_and_unparallelize() -> None:
    single: Any = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 5)).double()
    module: Any = copy.deepcopy(single)
    axis = all_ranks()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module, axis, plan)
    x = torch.randn(3, 7, dtype=torch.double)
    torch.testing.assert_close(module(x), single(x))
    single(x).square().sum().backward()
    module(x).square().sum().backward()
    assert_same_gradients(module, single)
    copied = copy.deepcopy(module)
    torch.testing.assert_close(copied(x), single(x))
    assert copied[0].weight is not module[0].weight
    unparallelize_module(module)
    assert type(module[0].weight) is nn.Parameter
    for mine, theirs in zip(module.parameters(), single.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(module(x), single(x), rtol=0, atol=0)
    parallelize_module(module, axis, plan)
    torch.testing.assert_close(module(x), single(x))
