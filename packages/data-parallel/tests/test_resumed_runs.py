"""Runs that resume from a checkpoint in new objects, under another kind of data parallelism.

Covers: fully_shard and replicate with `Checkpointer` and with torch's asynchronous saves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import StepLR

from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import full_tensor, get_state_dict, set_state_dict
from shoal_dtensor.checkpoint import Checkpointer
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks

KINDS = ("plain", "sharded", "hybrid", "divided", "replicated")


def made(kind: str, seed: int) -> Any:
    """A model, its optimizer and its schedule."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    ranks = dist.get_world_size()
    line = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
    grid = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    if kind == "sharded":
        fully_shard(model[0], mesh=line)
        fully_shard(model, mesh=line)
    elif kind == "hybrid":
        fully_shard(model, mesh=grid)
    elif kind == "divided":
        # the replicas divide the optimizer's state
        fully_shard(model, mesh=grid, shard_optimizer=True)
    elif kind == "replicated":
        replicate(model, line)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, StepLR(optimizer, 1, 0.5)


def train(run: Any, steps: int) -> None:
    model, optimizer, schedule = run
    for _ in range(steps):
        model(torch.linspace(0, 1, 8).double().view(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def whole_values(run: Any) -> dict[str, torch.Tensor]:
    values = {}
    for name, value in run[0].state_dict().items():
        whole = full_tensor(value)
        values[name] = whole.detach().clone()
    return values


def state_to(run: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer", "schedule"), run, strict=True))


@on_ranks(4, timeout=240)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_one_kind_goes_on_in_every_other(kind: str, tmp_path: Path) -> None:
    # a fresh optimizer lost its moments
    run = made(kind, 0)
    train(run, 3)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, state_to(run), background=True)
        train(run, 2)
        wanted = whole_values(run)
        for other in KINDS:
            fresh = made(other, 1)
            assert checkpoints.load(state_to(fresh)) == 3
            train(fresh, 2)
            torch.testing.assert_close(whole_values(fresh), wanted, rtol=1e-12, atol=1e-12)


@on_ranks(2, timeout=240)
@pytest.mark.parametrize("kind", ["sharded", "hybrid", "divided", "replicated"])
def test_an_asynchronous_save_of_torch_has_the_values_of_its_moment(
    kind: str, tmp_path: Path
) -> None:
    run = made(kind, 0)
    train(run, 2)
    state = dict(zip(("model", "optimizer"), get_state_dict(*run[:2]), strict=True))
    saved: Any = dcp.async_save(state, checkpoint_id=tmp_path)
    wanted = whole_values(run)
    train(run, 1)
    saved.result()
    fresh = made(kind, 1)
    to_fill = dict(zip(("model", "optimizer"), get_state_dict(*fresh[:2]), strict=True))
    dcp.load(to_fill, checkpoint_id=tmp_path)
    set_state_dict(
        *fresh[:2], model_state_dict=to_fill["model"], optim_state_dict=to_fill["optimizer"]
    )
    torch.testing.assert_close(whole_values(fresh), wanted, rtol=0, atol=0)
    for parameter in fresh[0].parameters():
        moment: Any = fresh[1].state[parameter]["exp_avg"]
        assert moment.any()
