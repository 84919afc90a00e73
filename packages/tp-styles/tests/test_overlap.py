"""Collectives in chunks that overlap with products, against one device.

Covers: lowering/overlap.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from one_device import as_one_device
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
)
from small_models import assert_same_parameters

# layout of the input on four ranks -> chunks of (8, 8, 12)
LAYOUTS: dict[str, tuple[Any, int]] = {
    "along the chunks": (Shard(0), 2),  # two rows of every rank
    "the same, counted from behind": (Shard(-3), 2),
    "beside the chunks": (Shard(1), 3),
    "features": (Shard(-1), 3),
    "of different sizes": (Shard(0, sizes=(1, 4, 0, 3)), 3),
    "different sizes beside the chunks": (Shard(1, sizes=(1, 7, 0, 0)), 3),
}


def own(tensor: torch.Tensor, placement: Any) -> torch.Tensor:
    """This rank's shard."""
    ranks, rank = all_ranks().size(), all_ranks().get_rank()
    sizes = placement.sizes or (tensor.shape[placement.dim] // ranks,) * ranks
    return tensor.narrow(placement.dim, sum(sizes[:rank]), sizes[rank])


def columns_are_as_on_one_device(
    placement: Any, chunks: int, features: int, bias: bool, given: str
) -> None:
    """Two readers of one sharded input: outputs, gradients, and the number of collectives."""
    single = nn.ModuleList([nn.Linear(12, features, bias=bias), nn.Linear(12, 4)]).double()
    style = ColwiseParallel(input_layouts=placement, output_layouts=Replicate()).overlapped(3)
    modules: Any = parallelize_module(copy.deepcopy(single), all_ranks(), {"*": style})
    full = torch.randn(8, 8, 12, dtype=torch.double)
    x, y = full.clone().requires_grad_(), own(full, placement).clone().requires_grad_()
    shape = full.shape
    read = (
        y * 1
        if given == "plain"
        else DTensor.from_local(
            y,
            all_ranks(),
            (placement.on_dim(placement.dim % 3),),
            shape=shape,
            stride=full.stride(),
        )
    )
    with CommDebugMode() as mode:
        outs = [module(read) for module in modules]
    # readers of a plain tensor share the gather
    gathers = chunks if given == "plain" else 2 * chunks
    assert mode.get_total_counts() == gathers + 2  # and those of the outputs
    expected = [module(x) for module in single]
    for out, one in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, one)
    seeds = [torch.randn_like(one) for one in expected]
    torch.autograd.backward(expected, seeds)
    torch.autograd.backward(outs, seeds)
    assert x.grad is not None
    torch.testing.assert_close(y.grad, own(x.grad, placement))
    assert_same_parameters(modules, single)


@on_ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("features", [8, 6])  # of 6 a rank has none
@pytest.mark.parametrize("given", ["plain", "DTensor"])
def test_columns_gather_in_chunks(layout: str, features: int, given: str) -> None:
    columns_are_as_on_one_device(*LAYOUTS[layout], features, features == 8, given)


@on_ranks(2)
@pytest.mark.parametrize(
    "placement", [Shard(0), Shard(1), Shard(0, sizes=(8, 0)), Shard(1, sizes=(3, 5))]
)
def test_columns_of_two_ranks(placement: Any) -> None:
    columns_are_as_on_one_device(placement, 3, 7, True, "plain")


@on_ranks(4)
@pytest.mark.parametrize(
    "placement", [Shard(0), Shard(1), Shard(0, sizes=(1, 4, 0, 3)), Replicate()]
)
# of 3 a rank has none, and no fewer collectives
@pytest.mark.parametrize("features", [12, 3])
def test_rows_in_both_directions(placement: Any, features: int) -> None:
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=placement).overlapped(2)
    x = torch.randn(8, 8, features, dtype=torch.double)
    run = as_one_device(nn.Linear(features, 4).double(), style, all_ranks(), [x], leaving=placement)
    scattered = isinstance(placement, Shard)
    assert run.forward == {"reduce_scatter" if scattered else "all_reduce": 2}
    # gathers of dy in chunks, then that of dx
    assert sum(run.backward.values()) == (3 if scattered else 1)


@on_ranks(2)
def test_few_rows_and_autocast() -> None:
    single = nn.Linear(12, 8)
    style = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()).overlapped(4)
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    for rows in (0, 2, 6):
        full = torch.randn(rows, 12)
        x, y = full.clone().requires_grad_(), own(full, Shard(0)).clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            expected, out = single(x), module(y)
        assert out.dtype is torch.bfloat16
        torch.testing.assert_close(out, expected)
        expected.float().square().sum().backward()
        out.float().square().sum().backward()
        assert x.grad is not None
        # summed in bfloat16
        torch.testing.assert_close(y.grad, own(x.grad, Shard(0)), rtol=2e-2, atol=2e-2)


def test_what_does_not_overlap_is_refused() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    style = ColwiseParallel(input_layouts=Shard(0)).overlapped(2)
    for module in (nn.Embedding(8, 4), nn.Conv1d(4, 4, 1), Own(4, 4)):
        with pytest.raises(UnsupportedModuleError, match="overlapped: the module must be a Linear"):
            style.sharding(module)
    with pytest.raises(UnsupportedModuleError, match="cannot be combined"):
        style.heads(2, 2).sharding(nn.Linear(4, 4))
    with pytest.raises(LayoutError, match=r"got input_layouts=Replicate.*leave out overlapped"):
        ColwiseParallel().overlapped(2).sharding(nn.Linear(4, 4))
    with pytest.raises(LayoutError, match="at least 1, got 0"):
        ColwiseParallel().overlapped(0)
