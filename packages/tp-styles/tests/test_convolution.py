"""Covers: modules/convolution.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import Replicate, Shard
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from shoal_tp_styles.testing import all_ranks, assert_same_parameters, own_shard

CONVS: list[tuple[Any, tuple[int, ...]]] = [
    (nn.Conv1d, (3, 6, 9)),
    (nn.Conv2d, (4, 6, 5, 5)),
    (nn.Conv3d, (4, 6, 4, 4, 4)),
]


@on_ranks(4)
@pytest.mark.parametrize(("kind", "shape"), CONVS)
@pytest.mark.parametrize("gathered", [False, True])
def test_convolution_pairs(kind: Any, shape: tuple[int, ...], gathered: bool) -> None:
    single: Any = nn.Sequential(kind(6, 10, 3, padding=1), nn.ReLU(), kind(10, 6, 3)).double()
    module: Any = copy.deepcopy(single)
    first = ColwiseParallel(output_layouts=Replicate() if gathered else None)
    second = RowwiseParallel(input_layouts=Replicate() if gathered else None)
    parallelize_module(module, all_ranks(), {"0": first, "2": second})
    full = torch.randn(shape, dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    expected, got = single(x), module(y)
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize("local", [True, False])
def test_convolution_by_rows_with_a_sharded_output(local: bool) -> None:
    single: Any = nn.Conv1d(7, 10, 3, padding=1).double()
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(2), use_local_output=local)
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    full = torch.randn(3, 7, 8, dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    expected, got = single(x), module(y)
    torch.testing.assert_close(got if local else got.to_local(), own_shard(expected, 2))
    seed = torch.randn_like(expected)
    expected.backward(seed)
    (got if local else got.to_local()).backward(own_shard(seed, 2))
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)
