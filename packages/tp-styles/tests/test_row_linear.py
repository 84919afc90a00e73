"""Covers: modules/row_linear.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import Replicate, Shard
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    RowwiseParallel,
    parallelize_module,
)
from shoal_tp_styles.testing import all_ranks, assert_same_parameters, own_shard
from tp_checks import assert_same_gradients, counts


@on_ranks(4)
@pytest.mark.parametrize("layout", [Replicate(), Shard(1), Shard(0)])
@pytest.mark.parametrize("bias", [True, False])
def test_overlapped_reduction(layout: Any, bias: bool) -> None:
    single: Any = nn.Linear(12, 8, bias=bias).double()
    module: Any = parallelize_module(
        copy.deepcopy(single), all_ranks(), RowwiseParallel(output_layouts=layout).overlapped(3)
    )
    full = torch.randn(4, 8, 12, dtype=torch.double)
    x, y = full.clone().requires_grad_(), own_shard(full, -1).clone().requires_grad_()
    expected, seed = single(x), torch.randn(4, 8, 8, dtype=torch.double)
    with CommDebugMode() as mode:
        got = module(y)
    # Four rows in three chunks are chunks of two; an output sharded along the chunked dim stays one collective.
    assert mode.get_total_counts() == (1 if layout == Shard(0) else 2)
    torch.testing.assert_close(got, expected if layout == Replicate() else own_shard(expected, layout.dim))
    expected.backward(seed)
    got.backward(seed if layout == Replicate() else own_shard(seed, layout.dim))
    assert x.grad is not None
    torch.testing.assert_close(y.grad, own_shard(x.grad, -1))
    assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [(Replicate(), {"all_reduce": 1}, {}), (Shard(0), {"reduce_scatter": 1}, {"all_gather": 1})],
)
@pytest.mark.parametrize("local", [True, False])
def test_rowwise_linear(layout: Any, forward: dict[str, int], backward: dict[str, int], local: bool) -> None:
    axis, single = all_ranks(), nn.Linear(16, 12).double()
    module: Any = parallelize_module(
        copy.deepcopy(single), axis, RowwiseParallel(output_layouts=layout, use_local_output=local)
    )
    full = torch.randn(8, 16, dtype=torch.double, requires_grad=True)
    x = own_shard(full, 1).requires_grad_()
    with CommDebugMode() as mode:
        out = module(x)
    assert counts(mode) == forward
    expected = single(full)
    place = (lambda t: t) if layout == Replicate() else (lambda t: own_shard(t, 0))
    part = out if local else out.to_local()
    torch.testing.assert_close(part, place(expected))
    seed = torch.randn(8, 12, dtype=torch.double)
    expected.backward(seed)
    with CommDebugMode() as mode:
        part.backward(place(seed))
    assert counts(mode) == backward
    assert full.grad is not None
    torch.testing.assert_close(x.grad, own_shard(full.grad, 1))
    assert_same_gradients(module, single)
