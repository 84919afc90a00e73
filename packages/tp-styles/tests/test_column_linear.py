"""Covers: modules/column_linear.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    parallelize_module,
)
from shoal_tp_styles.testing import all_ranks, own_shard
from tp_checks import assert_same_gradients, counts


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [(Replicate(), {}, {"all_reduce": 1}), (Shard(0), {"all_gather": 1}, {"reduce_scatter": 1})],
)
@pytest.mark.parametrize("local", [True, False])
def test_colwise_linear(layout: Any, forward: dict[str, int], backward: dict[str, int], local: bool) -> None:
    axis, single = all_ranks(), nn.Linear(16, 16).double()
    module: Any = parallelize_module(
        copy.deepcopy(single), axis, ColwiseParallel(input_layouts=layout, use_local_output=local)
    )
    full = torch.randn(8, 16, dtype=torch.double, requires_grad=True)
    x = full.detach().clone() if layout == Replicate() else own_shard(full, 0)
    x.requires_grad_()
    with CommDebugMode() as mode:
        out = module(x)
    assert counts(mode) == forward
    assert isinstance(out, DTensor) is not local
    part = out if local else out.to_local()
    assert part.shape == (8, 16 // axis.size())
    expected = single(full)
    torch.testing.assert_close(part, own_shard(expected, 1))
    seed = torch.randn(8, 16, dtype=torch.double)
    expected.backward(seed)
    with CommDebugMode() as mode:
        part.backward(own_shard(seed, 1))
    assert counts(mode) == backward
    assert full.grad is not None
    torch.testing.assert_close(x.grad, full.grad if layout == Replicate() else own_shard(full.grad, 0))
    assert_same_gradients(module, single)


@on_ranks(4)
def test_fewer_features_than_ranks() -> None:
    torch.manual_seed(0)
    single = nn.Linear(12, 2).double()
    module = parallelize_module(copy.deepcopy(single), all_ranks(), ColwiseParallel(output_layouts=Replicate()))
    x = torch.randn(2, 4, 12, dtype=torch.double)
    torch.testing.assert_close(module(x), single(x))
    module(x).square().sum().backward()
    single(x).square().sum().backward()
    assert_same_gradients(module, single)
