"""A rank alone that raises in a step of `fully_shard` or `replicate`, and the step after; on ranks of their own.

Covers: data_parallel/backward_pass.py, data_parallel/gradient_buckets.py.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from data_parallel_model import Fault, Model, batch, full, loss_of, mesh_of, own, raising, same_gradients
from shoal_dtensor import DTensor, local_shard
from shoal_mesh import DeviceMesh, launch, restart_world
from shoal_mesh.errors import CollectiveError
from shoal_tp_styles import fully_shard, replicate

TIMEOUT = 6


def built(kind: str, mesh: DeviceMesh | None) -> Any:
    torch.manual_seed(0)
    model: Any = Model(6, 2).double()
    if mesh is None:
        return model
    if kind == "replicate":
        return replicate(model, mesh["data"])
    for block in model.blocks:
        fully_shard(block, mesh["data"])
    return fully_shard(model, mesh["data"])


def held(param: Any) -> torch.Tensor:
    """What this rank has of a parameter."""
    return (local_shard(param) if isinstance(param, DTensor) else param).detach()


def fails_alone(kind: str, where: str) -> None:
    mesh = mesh_of(dist.get_world_size(), 1)
    plain, model = built(kind, None), built(kind, mesh)
    for one, rows in ((plain, batch(0)), (model, own(mesh, *batch(0)))):
        loss_of(one, *rows).backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        one.zero_grad()
    before = [held(param).clone() for param in model.parameters()]
    dist.distributed_c10d._set_pg_timeout(dt.timedelta(seconds=TIMEOUT), mesh["data"].get_group())
    alone = dist.get_rank() == 1
    with pytest.raises(Fault if alone else CollectiveError, match=where if alone else "waited"):
        step(model, mesh, where if alone else "")
    assert all(param.grad is None for param in model.parameters())
    assert all(map(torch.equal, map(held, model.parameters()), before))
    restart_world(timeout=1800)  # the groups have lost count of their collectives; mesh and model go on with new ones
    loss_of(plain, *batch(1)).backward()
    step(model, mesh, "")
    same_gradients(plain, model)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param), other)


def step(model: Any, mesh: DeviceMesh, where: str) -> None:
    module: nn.Module = model.blocks[1].up
    if where:
        with raising(module, where):
            loss_of(model, *own(mesh, *batch(1))).backward()
    else:
        loss_of(model, *own(mesh, *batch(1))).backward()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
def test_the_other_ranks_end_too_and_nothing_has_changed(kind: str, where: str) -> None:
    launch(fails_alone, 2, kind, where, timeout=120)
