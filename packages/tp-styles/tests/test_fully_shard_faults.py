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

from data_parallel_model import PLAN, Fault, Model, batch, full, loss_of, mesh_of, own, raising, same_gradients
from shoal_dtensor import DTensor, local_shard
from shoal_mesh import DeviceMesh, launch, restart_world
from shoal_mesh.errors import CollectiveError
from shoal_tp_styles import fully_shard, parallelize_module, replicate

TIMEOUT = 6


def built(kind: str, mesh: DeviceMesh | None) -> Any:
    torch.manual_seed(0)
    model: Any = Model(6, 2).double()
    if mesh is None:
        return model
    if "tensor" in kind:
        parallelize_module(model, mesh["tensor"], PLAN)
    if "replicate" in kind:
        return replicate(model, mesh["data"], shard_optimizer="state" in kind)
    for block in model.blocks:
        fully_shard(block, mesh["data"])
    return fully_shard(model, mesh["data"])


def held(param: Any) -> torch.Tensor:
    """What this rank has of a parameter."""
    return (local_shard(param) if isinstance(param, DTensor) else param).detach()


def parameters_and_state(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """What this rank has of parameters, and of all that an optimizer keeps for them."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return [*map(held, model.parameters()), *(held(value) for value in kept)]


def fails_alone(kind: str, where: str) -> None:
    tensor = 2 if "tensor" in kind else 1
    mesh = mesh_of(dist.get_world_size() // tensor, tensor)
    plain, model = built(kind, None), built(kind, mesh)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (plain, model)]
    for one, optimizer, rows in zip((plain, model), optimizers, (batch(0), own(mesh, *batch(0))), strict=True):
        loss_of(one, *rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [value.clone() for value in parameters_and_state(model, optimizers[1])]
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(dt.timedelta(seconds=TIMEOUT), group)
    alone = dist.get_rank() == 1
    with pytest.raises(Fault if alone else CollectiveError, match=where if alone else "waited"):
        step(model, mesh, where if alone else "")
    assert all(param.grad is None for param in model.parameters())
    assert all(map(torch.equal, parameters_and_state(model, optimizers[1]), before))
    restart_world(timeout=1800)  # the groups have lost count of their collectives; mesh and model go on with new ones
    loss_of(plain, *batch(1)).backward()
    step(model, mesh, "")
    same_gradients(plain, model)
    for optimizer in optimizers:
        optimizer.step()
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
@pytest.mark.parametrize("kind", ["fully_shard", "replicate", "replicate, sharded state", "fully_shard x tensor"])
def test_the_other_ranks_end_too_and_nothing_has_changed(kind: str, where: str) -> None:
    launch(fails_alone, 4 if "tensor" in kind else 2, kind, where, timeout=120)
