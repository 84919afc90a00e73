"""Modules of which parts are frozen, adapted, or on axes of their own, under `fully_shard`.

The tests run on real gloo ranks.

Covers: unit.py, reduction.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_parallel_checks import full_state_dicts_load
from data_parallel_model import (
    adapted,
    mesh_of,
    same_gradients,
    same_weights,
    shard_blocks_and_root,
    train_alike,
)
from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import Shard, distribute_tensor
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.differentiable import all_gather, reduce_scatter
from shoal_mesh.testing import on_ranks

# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [shard_blocks_and_root, replicate])
@on_ranks(4)
def test_adapters_of_a_frozen_model_train_as_on_one_device(shard: Any) -> None:
    mesh = mesh_of(4, 1)
    plain, model = adapted(), adapted()
    shard(model, mesh["data"])
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01)
        for m in (plain, model)
    ]
    assert len(optimizers[1].param_groups[0]["params"]) == 8
    train_alike(plain, model, mesh, optimizers)


# --- experts --------------------------------------------------------------------------------------


class GatheringExperts(nn.Module):
    """Experts whose weights are one parameter.

    The experts that a rank along an axis holds see all rows of the axis.
    """

    axis: tuple[DeviceMesh, int] | None = None

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, 6, 6))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        if self.axis is None:
            return _mixed(x, gates, self.weight)
        own: Any = self.weight
        rows, shares = all_gather(x, self.axis), all_gather(gates, self.axis)
        at = self.axis[0].get_local_rank()
        local = own.to_local()
        mine = shares[:, at * len(local) : (at + 1) * len(local)]
        return reduce_scatter(_mixed(rows, mine, local), self.axis)


def _mixed(x: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("re,eij,rj->ri", gates, weight, x)


class RoutedBetweenDense(nn.Module):
    """A router and its experts, between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.router, self.experts, self.down = (
            nn.Linear(6, 6),
            nn.Linear(6, 4),
            GatheringExperts(4),
            nn.Linear(6, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(x))
        out: Tensor = self.down(x + self.experts(x, self.router(x).softmax(-1)))
        return out


@pytest.mark.parametrize("dense", ["flat", "replicated over the first"])
@on_ranks(4)
def test_experts_on_an_axis_that_is_data_to_the_dense_layers(dense: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    torch.manual_seed(0)
    plain = RoutedBetweenDense().double()
    model: Any = copy.deepcopy(plain)
    experts = model.experts
    experts.axis = mesh["expert"], 0
    experts.weight = nn.Parameter(
        distribute_tensor(experts.weight.detach(), mesh["expert"], [Shard(0)])
    )
    # An expert sees the rows of all ranks of its axis, so its gradient is a sum over them already.
    fully_shard(
        experts, mesh["data"], shard_placement_fn=lambda param: Shard(1)
    ).set_gradient_divide_factor(4)
    fully_shard(model, mesh.flatten() if dense == "flat" else mesh)
    assert model.experts.weight.placements == (Shard(1), Shard(0))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (plain, model)]
    for number in range(3):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        plain(x).square().mean().backward()
        model(x.chunk(4)[torch.distributed.get_rank()]).square().mean().backward()
        same_gradients(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_weights(plain, model)


@on_ranks(4)
def test_units_on_slices_and_orders_of_axes_of_their_own() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    model: Any = copy.deepcopy(plain)
    for module, data in zip(model, (mesh["a"], mesh["a"], mesh["b", "a"], mesh), strict=True):
        fully_shard(module, data)
    fully_shard(model, mesh["a"])
    x = torch.randn(8, 6, dtype=torch.float64)
    plain(x).square().mean().backward()
    # the ranks of "b" have the same rows
    model(x.chunk(2)[mesh.get_local_rank("a")]).square().mean().backward()
    same_gradients(plain, model)
    assert all_reduce(torch.ones(()), (mesh, "a")).item() == 2


# --- full state dicts -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fully_shard", "replicate", "ZeRO-1"])
@on_ranks(4, timeout=120)
def test_full_state_dicts_go_to_one_device_and_to_other_degrees(kind: str) -> None:
    full_state_dicts_load(kind)
