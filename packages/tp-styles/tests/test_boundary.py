"""Layouts of the inputs and outputs of modules.  Covers: lowering/ports.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal_dtensor import Replicate, Shard, checked_replicas
from shoal_mesh import LockstepError, lockstep
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


@pytest.mark.parametrize("block", [lockstep, checked_replicas])
@pytest.mark.parametrize(
    "style",
    [ColwiseParallel(), RowwiseParallel(input_layouts=Replicate())],
    ids=["columns", "rows"],
)
@on_ranks(2)
def test_batches_that_differ_on_tensor_parallel_ranks_are_found(style: Any, block: Any) -> None:
    """Without a check each rank would compute with its own batch, and the sums would mix them."""
    rank = dist.get_rank()
    module = nn.Linear(4, 6)
    parallel = parallelize_module(module, all_ranks(), style)
    same = torch.ones(3, 4)
    with block():
        parallel(same)
        with pytest.raises(LockstepError, match=r"replicas of the input of .* differ"):
            parallel(same + rank)
