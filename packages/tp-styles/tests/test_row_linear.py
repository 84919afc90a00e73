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
    LayoutError,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
)
from shoal_tp_styles.testing import all_ranks, assert_same_parameters, own_shard
from tp_checks import assert_same_gradients, counts

OVERLAPPED: dict[str, tuple[Any, int]] = {  # layout of the output -> chunks of eight rows
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
        with pytest.raises(UnsupportedModuleError, match="overlapped: takes a Linear"):
            RowwiseParallel().overlapped(2).sharding(module)


@on_ranks(4)
@pytest.mark.parametrize("layout", OVERLAPPED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_overlapped_reduction(layout: str, bias: bool, local: bool) -> None:
    placement, chunks = OVERLAPPED[layout]
    single: Any = nn.Linear(12, 8, bias=bias).double()
    style = RowwiseParallel(output_layouts=placement, use_local_output=local).overlapped(3)
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    full = torch.randn(8, 8, 12, dtype=torch.double)
    x, y = full.clone().requires_grad_(), own_shard(full, -1).clone().requires_grad_()
    expected, seed = single(x), torch.randn(8, 8, 8, dtype=torch.double)
    with CommDebugMode() as mode:
        got = module(y)
    assert mode.get_total_counts() == chunks
    got = got if local else got.to_local()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if placement.is_replicate():
            return tensor
        sizes = placement.sizes or (tensor.shape[placement.dim] // 4,) * 4
        start = sum(sizes[: all_ranks().get_rank()])
        return tensor.narrow(placement.dim, start, sizes[all_ranks().get_rank()])

    torch.testing.assert_close(got, own(expected))
    expected.backward(seed)
    got.backward(own(seed))
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


@on_ranks(2)
def test_an_input_with_all_features_is_told_from_a_shard() -> None:
    layer: Any = parallelize_module(nn.Linear(6, 4), all_ranks(), RowwiseParallel())
    with pytest.raises(LayoutError, match=r"3 of 6 features.*got shape \(2, 6\).*input_layouts=Replicate"):
        layer(torch.ones(2, 6))
    with pytest.raises(RuntimeError, match="dtype"):  # other errors stay torch's
        layer(torch.ones(2, 3, dtype=torch.float64))
