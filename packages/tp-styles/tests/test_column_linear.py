"""Linear layers by columns.  Covers: modules/sharded_linear.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from one_device import as_one_device
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
)


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [(Replicate(), {}, {"all_reduce": 1}), (Shard(0), {"all_gather": 1}, {"reduce_scatter": 1})],
)
@pytest.mark.parametrize("local", [True, False])
def test_colwise_linear(
    layout: Any, forward: dict[str, int], backward: dict[str, int], local: bool
) -> None:
    style = ColwiseParallel(input_layouts=layout, use_local_output=local)
    x = torch.randn(8, 16, dtype=torch.double)
    single = nn.Linear(16, 16).double()
    run = as_one_device(single, style, all_ranks(), [x], arriving=layout, leaving=Shard(1))
    assert (run.forward, run.backward) == (forward, backward)
    assert isinstance(run.outputs[0], DTensor) is not local


@on_ranks(4)
def test_fewer_features_than_ranks() -> None:
    style = ColwiseParallel(output_layouts=Replicate())
    as_one_device(
        nn.Linear(12, 2).double(), style, all_ranks(), [torch.randn(2, 4, 12, dtype=torch.double)]
    )
