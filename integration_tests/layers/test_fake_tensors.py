"""Training steps on fake tensors over real groups.

Covers: shoal_data_parallel/{reduction,sharded_parameters,sharding}.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shoal_data_parallel import fully_shard
from shoal_dtensor.internal import local_shard
from shoal_mesh import all_reduce, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module


@on_ranks(4)
def test_steps_on_fake_tensors_send_nothing() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh["data"])
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        parameters: list[Any] = list(model.parameters())
        assert all(isinstance(local_shard(parameter), FakeTensor) for parameter in parameters)
    assert all_reduce(torch.ones(1), (mesh, "data")).item() == 2
