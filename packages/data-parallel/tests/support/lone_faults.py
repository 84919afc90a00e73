"""A rank alone that raises in a step, and the step after; on ranks of their own."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from data_parallel_model import (
    Fault,
    Model,
    batch,
    full,
    loss_of,
    mesh_of,
    own,
    raising,
    same_gradients,
    shard_blocks_and_root,
)
from shoal_data_parallel import replicate
from shoal_dtensor import DTensor
from shoal_dtensor.internal import local_shard
from shoal_mesh import DeviceMesh, restart_world
from shoal_mesh.errors import CollectiveError

TIMEOUT = 6


def outlive_a_fault(
    kind: str, where: str, parallel: Callable[[Any, DeviceMesh], Any] | None = None
) -> bool:
    """Have the second rank raise in a step; check that nothing has changed, and the step after.

    Args:
        kind: `fully_shard`, or `replicate`, with "state" for sharded state of the optimizer.
        where: where the second rank raises, `forward` or `backward`.
        parallel: makes a model parallel along the axis "tensor", which has two ranks then.

    Returns:
        Whether the fault itself ended this rank's step, and not a collective that waited for it.
    """
    tensor = 1 if parallel is None else 2
    mesh = mesh_of(dist.get_world_size() // tensor, tensor)
    plain, model = _built(), _built()
    if parallel is not None:
        parallel(model, mesh)
    if "replicate" in kind:
        replicate(model, mesh["data"], shard_optimizer="state" in kind)
    else:
        shard_blocks_and_root(model, mesh["data"])
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (plain, model)]
    for one, optimizer, rows in zip(
        (plain, model), optimizers, (batch(0), own(mesh, *batch(0))), strict=True
    ):
        loss_of(one, *rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [value.clone() for value in _parameters_and_state(model, optimizers[1])]
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(dt.timedelta(seconds=TIMEOUT), group)
    alone = dist.get_rank() == 1
    message = where if alone else "waited"
    with pytest.raises((Fault, CollectiveError), match=message) as raised:
        _step(model, mesh, where if alone else "")
    assert all(param.grad is None for param in model.parameters())
    assert all(map(torch.equal, _parameters_and_state(model, optimizers[1]), before))
    # the groups have lost count of their collectives; mesh and model go on with new ones
    restart_world(timeout=1800)
    loss_of(plain, *batch(1)).backward()
    _step(model, mesh, "")
    same_gradients(plain, model)
    for optimizer in optimizers:
        optimizer.step()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param), other)
    return raised.errisinstance(Fault)


def _built() -> Any:
    torch.manual_seed(0)
    return Model(6, 2).double()


def _held(param: Any) -> torch.Tensor:
    """What this rank has of a parameter."""
    return (local_shard(param) if isinstance(param, DTensor) else param).detach()


def _parameters_and_state(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """What this rank has of parameters, and of all that an optimizer keeps for them."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return [*map(_held, model.parameters()), *(_held(value) for value in kept)]


def _step(model: Any, mesh: DeviceMesh, where: str) -> None:
    module: nn.Module = model.blocks[1].up
    if where:
        with raising(module, where):
            loss_of(model, *own(mesh, *batch(1))).backward()
    else:
        loss_of(model, *own(mesh, *batch(1))).backward()
