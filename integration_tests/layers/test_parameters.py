"""The dtype that is chosen for gradients holds over data axes, with styles and without.

Covers: shoal_data_parallel/gradients/reduction.py, shoal_tp_styles/lowering/parameters.py,
modules/gradient_routes.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_data_parallel import fully_shard, replicate
from shoal_mesh import all_reduce, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from tp_checks import global_value


def by_fully_shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Both layers as units."""
    for each in (model[0], model[2], model):  # type: ignore[index]  # a Sequential
        fully_shard(each, mesh=mesh)
    return model


DATA: dict[str, Any] = {
    "fully_shard": by_fully_shard,
    "replicate": lambda model, mesh: replicate(model, mesh=mesh),
    "optimizer": lambda model, mesh: replicate(model, mesh=mesh, shard_optimizer=True),
}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("data", DATA)
@on_ranks(4)
def test_the_chosen_dtype_holds_over_data_axes(data: str, tensor: int) -> None:
    mesh = init_device_mesh("cpu", (4 // tensor, tensor), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).bfloat16()
    model: Any = copy.deepcopy(single)
    for param in model.parameters():
        param.grad_dtype = torch.float32
    model = DATA[data](parallelize_module(model, mesh["tp"], plan), mesh["dp"])
    local = parallelize_module(copy.deepcopy(single), mesh["tp"], plan)
    sums: dict[str, Any] = {}
    for step in range(3):
        torch.manual_seed(10 * step + mesh.get_local_rank("dp"))
        x = torch.randn(3, 8).bfloat16()
        model(x).square().sum().backward()
        local.zero_grad()
        local(x).square().sum().backward()
        for name, param in local.named_parameters():
            assert param.grad is not None
            mean = all_reduce(global_value(param.grad).float(), mesh.comm(0)) / mesh.size(0)
            sums[name] = sums.get(name, 0) + mean
    for name, param in model.named_parameters():
        assert param.grad.dtype is param.grad_dtype is torch.float32
        assert torch.equal(global_value(param.grad), sums[name]), name
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
