"""Linear layers by rows.  Covers: modules/sharded_linear.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from one_device import as_one_device
from shoal_dtensor import DTensor, Partial, Replicate, Shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    LayoutError,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
)

# layout of the output -> chunks of eight rows
OVERLAPPED: dict[str, tuple[Any, int]] = {
    "reduced": (Replicate(), 3),
    "scattered beside the chunks": (Shard(1), 3),
    "scattered along the chunks": (Shard(0), 2),  # two rows of every rank
    "the same, counted from behind": (Shard(-3), 2),
    "of different sizes": (Shard(0, sizes=(1, 4, 0, 3)), 3),
    "different sizes beside the chunks": (Shard(1, sizes=(1, 4, 0, 3)), 3),
}


def test_only_a_linear_overlaps() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    for module in (nn.Embedding(8, 4), nn.Conv1d(4, 4, 1), Own(4, 4)):
        with pytest.raises(UnsupportedModuleError, match="overlapped: the module must be a Linear"):
            RowwiseParallel().overlapped(2).sharding(module)


@on_ranks(4)
@pytest.mark.parametrize("layout", OVERLAPPED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_overlapped_reduction(layout: str, bias: bool, local: bool) -> None:
    placement, chunks = OVERLAPPED[layout]
    style = RowwiseParallel(output_layouts=placement, use_local_output=local).overlapped(3)
    x = torch.randn(8, 8, 12, dtype=torch.double)
    single = nn.Linear(12, 8, bias=bias).double()
    run = as_one_device(single, style, all_ranks(), [x], arriving=Shard(-1), leaving=placement)
    assert sum(run.forward.values()) == chunks
    assert isinstance(run.outputs[0], DTensor) is not local


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [
        (Replicate(), {"all_reduce": 1}, {}),
        (Shard(0), {"reduce_scatter": 1}, {"all_gather": 1}),
        (Partial(), {}, {}),
    ],
)
@pytest.mark.parametrize("local", [True, False])
def test_rowwise_linear(
    layout: Any, forward: dict[str, int], backward: dict[str, int], local: bool
) -> None:
    style = RowwiseParallel(output_layouts=layout, use_local_output=local)
    x = torch.randn(8, 16, dtype=torch.double)
    single = nn.Linear(16, 12).double()
    run = as_one_device(single, style, all_ranks(), [x], arriving=Shard(1), leaving=layout)
    assert (run.forward, run.backward) == (forward, backward)
    assert isinstance(run.outputs[0], DTensor) is not local


@fake_world(2)
def test_an_input_with_all_features_is_told_from_a_shard() -> None:
    layer: Any = parallelize_module(
        nn.Linear(6, 4), init_device_mesh("cpu", (2,)), RowwiseParallel()
    )
    with pytest.raises(
        LayoutError, match=r"3 of 6 features.*got shape \(2, 6\).*input_layouts=Replicate"
    ):
        layer(torch.ones(2, 6))
    with pytest.raises(RuntimeError, match="dtype"):  # other errors stay torch's
        layer(torch.ones(2, 3, dtype=torch.float64))
