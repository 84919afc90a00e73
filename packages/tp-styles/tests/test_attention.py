"""Heads of an attention on their ranks.

Covers: modules/composed_linear.py, styles/activation.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import Shard
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    HeadParallel,
    parallelize_module,
)
from small_models import assert_same_parameters, own_shard


@on_ranks(4)
@pytest.mark.parametrize("heads", [8, 6])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention(heads: int, batch_first: bool, weights: bool) -> None:
    single: Any = nn.MultiheadAttention(24, heads, batch_first=batch_first).double()
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), HeadParallel())
    shape = (3, 4, 24)
    full = torch.randn(shape, dtype=torch.double)
    length, batch = (4, 3) if batch_first else (3, 4)
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[0, -1] = True
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    other = torch.randn(shape, dtype=torch.double)
    for options in ({"key_padding_mask": padding}, {"attn_mask": mask}, {}):
        for same in (True, False):
            x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
            k = other
            expected, scores = single(
                x, x if same else k, x if same else k, need_weights=weights, **options
            )
            got, ours = module(
                y, y if same else k, y if same else k, need_weights=weights, **options
            )
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(ours, scores)
            expected.square().sum().backward()
            with CommDebugMode() as mode:
                got.square().sum().backward()
            assert mode.get_total_counts() == 1
            torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize("heads", [8, 6])
@pytest.mark.parametrize(("kdim", "vdim"), [(5, None), (None, 7), (5, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_keys_and_values_with_dims_of_their_own(
    heads: int, kdim: int | None, vdim: int | None, bias: bool
) -> None:
    options: Any = {"kdim": kdim, "vdim": vdim, "bias": bias, "batch_first": True}
    single: Any = nn.MultiheadAttention(24, heads, **options).double()
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), HeadParallel())
    full = [
        torch.randn(2, rows, dim or 24, dtype=torch.double)
        for rows, dim in ((3, 24), (4, kdim), (4, vdim))
    ]
    theirs, ours = ([x.clone().requires_grad_() for x in full] for _ in range(2))
    expected, got = single(*theirs)[0], module(*ours)[0]
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    for x, y in zip(theirs, ours, strict=True):
        torch.testing.assert_close(y.grad, x.grad)
    held = module.k_proj_weight.to_local().shape[0] * heads // 24
    assert held in (1, 2)  # complete heads
    assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize("heads", [8, 6])
@pytest.mark.parametrize("weights", [True, False])
def test_dropout_of_attention_is_that_of_one_device(heads: int, weights: bool) -> None:
    single: Any = nn.MultiheadAttention(24, heads, dropout=0.4, batch_first=True).double()
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), HeadParallel())
    full = torch.randn(2, 5, 24, dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    torch.manual_seed(11)
    expected, scores = single(x, x, x, need_weights=weights)
    torch.manual_seed(11)
    got, ours = module(y, y, y, need_weights=weights)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(ours, scores)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_leaves_along_the_sequence(batch_first: bool) -> None:
    layout = Shard(1 if batch_first else 0)
    single: Any = nn.MultiheadAttention(24, 6, batch_first=batch_first).double()
    nn.init.normal_(single.out_proj.bias)
    module: Any = parallelize_module(
        copy.deepcopy(single), all_ranks(), HeadParallel(output_layouts=layout)
    )
    full = torch.randn((3, 8, 24) if batch_first else (8, 3, 24), dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    expected, _ = single(x, x, x)
    got, _ = module(y, y, y)
    torch.testing.assert_close(got, own_shard(expected, layout.dim))
    seed = torch.randn_like(full)
    expected.backward(seed)
    got.backward(own_shard(seed, layout.dim))
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)
