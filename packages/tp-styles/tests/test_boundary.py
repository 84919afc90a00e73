"""Layouts of the inputs and outputs of modules.  Covers: lowering/ports.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shoal_dtensor import Replicate, Shard
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from small_models import assert_same_parameters, own_shard


@on_ranks(4)
def test_layouts_that_need_a_move() -> None:
    axis = all_ranks()
    single: Any = nn.Linear(8, 12).double()
    full = torch.randn(8, 8, dtype=torch.double)
    for style, arrive, leave in (
        (ColwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(0)), 1, 0),
        (RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(-1)), 0, 1),
        (RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)), None, 0),
    ):
        module = parallelize_module(copy.deepcopy(single), axis, style)
        x = full.clone().requires_grad_()
        y = (full if arrive is None else own_shard(full, arrive)).clone().requires_grad_()
        single.zero_grad()
        expected, got = single(x), module(y)
        torch.testing.assert_close(got, own_shard(expected, leave))
        seed = torch.randn_like(expected)
        expected.backward(seed)
        got.backward(own_shard(seed, leave))
        assert x.grad is not None
        torch.testing.assert_close(y.grad, x.grad if arrive is None else own_shard(x.grad, arrive))
        assert_same_parameters(module, single)
