"""Objects from before a restart of process groups work with new groups in the same processes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shoal_data_parallel import fully_shard
from shoal_dtensor import Replicate, Shard, distribute_tensor
from shoal_mesh import init_device_mesh, restart_world
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module


@on_ranks(4)
def test_meshes_tensors_modules_and_optimizers_go_on() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
    model: Any = parallelize_module(
        copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    model = fully_shard(model, mesh["dp"])
    x = torch.arange(24.0).view(4, 6).double().sin()
    rows = x.chunk(2)[mesh.get_local_rank("dp")]
    held = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True) for m in (plain, model)]
    for _ in range(3):
        for module, inputs, optimizer in zip((plain, model), (x, rows), optimizers, strict=True):
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(model(rows), plain(x).chunk(2)[mesh.get_local_rank("dp")])
        restart_world()
        torch.testing.assert_close(
            held.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor(), x
        )
        product: Any = held @ held.t()
        torch.testing.assert_close(product.full_tensor(), x @ x.t())
