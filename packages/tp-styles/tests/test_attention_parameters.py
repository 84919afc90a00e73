"""Covers: styles/activation.py, composed_linear.py, own_forward.py: latent attention and sinks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import Shard
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LatentProjection,
    LayoutError,
    OwnParameters,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
    unparallelize_module,
)
from tp_checks import assert_same_gradients


class LatentHeadsWithSinks(nn.Module):
    """Four heads of two features with a sink each.

    All heads read two more features beside the latent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.out = nn.Linear(6, 5), nn.Linear(3, 8, bias=False), nn.Linear(8, 6)
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        down = self.down(x)
        latent, read = down[..., :3], down[..., 3:]
        heads = self.up(latent).unflatten(-1, (-1, 2))
        mixed = (heads * read.unsqueeze(-2)).tanh() + self.sinks.view(-1, 1)
        out: Tensor = self.out(mixed.flatten(-2))
        return out


PLAN = {
    "": OwnParameters(dims={"sinks": 0}),
    "down": LatentProjection(rotary=2),
    "up": ColwiseParallel(),
    "out": RowwiseParallel(),
}


@on_ranks(4)
def test_heads_read_features_beside_the_latent_and_sinks_of_their_own() -> None:
    torch.manual_seed(1)
    single: Any = LatentHeadsWithSinks().double()
    module: Any = copy.deepcopy(single)
    parallelize_module(module, all_ranks(), PLAN)
    assert module.sinks.placements == (Shard(0),) and module.sinks.to_local().shape == (1,)
    x = torch.randn(3, 6, dtype=torch.double, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, got = single(x), module(y)
    torch.testing.assert_close(got, out)
    out.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_gradients(module, single)


class Counted(nn.Module):
    """Reshapes by its own number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.inner, self.size = 4, 8, 2.0
        self.up, self.out = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.up(x).view(-1, self.heads, 2).tanh().reshape(-1, self.inner))
        return out


COUNTED = {"up": ColwiseParallel(), "out": RowwiseParallel()}


@on_ranks(4)
def test_a_forward_reads_this_ranks_part_of_its_counts() -> None:
    torch.manual_seed(1)
    single = Counted().double()
    module: Any = copy.deepcopy(single)
    parallelize_module(
        module, all_ranks(), {"": OwnParameters(counts=("heads", "inner")), **COUNTED}
    )
    x = torch.randn(3, 6, dtype=torch.double)
    out, got = single(x), module(x)
    torch.testing.assert_close(got, out)
    assert (module.heads, module.inner) == (4, 8)
    out.square().sum().backward()
    got.square().sum().backward()
    assert_same_gradients(module, single)
    module.heads = 6
    with pytest.raises(
        LayoutError,
        match="heads of Counted is 6, which cannot be divided equally by 4 ranks",
    ):
        parallelize_module(
            unparallelize_module(module), all_ranks(), OwnParameters(counts=("heads",))
        )


def test_parameters_and_features_that_are_not_there_are_refused() -> None:
    with pytest.raises(LayoutError, match="no such parameter"):
        OwnParameters(dims={"sink": 0}).sharding(LatentHeadsWithSinks())
    bare: Any = LatentHeadsWithSinks()
    bare.sinks = None
    assert not OwnParameters(dims={"sinks": 0}).sharding(bare).parameters
    with pytest.raises(LayoutError, match="Counted does not have an integer attribute 'size'"):
        OwnParameters(counts=("size",)).sharding(Counted())
    with pytest.raises(LayoutError, match=r"one of shape \(4,\)"):
        OwnParameters(dims={"sinks": 1}).sharding(LatentHeadsWithSinks())
    with pytest.raises(LayoutError, match="does not have 9 features"):
        LatentProjection(rotary=9).sharding(nn.Linear(6, 5))
    with pytest.raises(UnsupportedModuleError, match="Linear"):
        LatentProjection(rotary=1).sharding(nn.Bilinear(2, 2, 2))
