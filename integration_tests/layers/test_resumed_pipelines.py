"""Checkpoints of pipelined models, resumed on other numbers of stages, with the optimizers' state.

Covers: shoal_data_parallel/pipeline_stages.py, shoal_dtensor/api/state_dicts.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from data_parallel_model import Block, same_weights
from shoal_data_parallel import (
    FSDPModule,
    ReplicateModule,
    fully_shard,
    prepare_pipeline,
    replicate,
)
from shoal_dtensor import get_state_dict, set_state_dict
from shoal_dtensor.checkpoint import Checkpointer
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks

BLOCKS = 4
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Blocks(nn.Module):
    """Some blocks of a model, each under its number in the whole model."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block(6) for number in numbers})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


class Run:
    """A training run of the stages of this rank.

    Args:
        ranks: the number of ranks along the pipeline, and along the data axis.
        stages: the number of stages.
        kind: "shards" or "sharded optimizers".
        whole: the model with its first values.
    """

    def __init__(self, ranks: tuple[int, int], stages: int, kind: str, whole: Any) -> None:
        mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("stage", "data"))
        position = mesh.get_local_rank("stage")
        indices = range(position, stages, ranks[0])
        size = BLOCKS // stages
        self.is_first, self.is_last = 0 in indices, stages - 1 in indices
        self.parts, self.part = ranks[1], mesh.get_local_rank("data")
        self.models: list[Any] = []
        made = []
        for index in indices:
            model: Any = Blocks(range(index * size, index * size + size)).double()
            for number, block in model.blocks.items():
                block.load_state_dict(whole.blocks[number].state_dict())
            if kind == "shards":
                for block in model.blocks.values():
                    fully_shard(block, mesh["data"])
                fully_shard(model, mesh["data"])
            else:
                replicate(model, mesh["data"], shard_optimizer=True)
            self.models.append(model)
            group = mesh.get_group("stage")
            made.append(PipelineStage(model, index, stages, torch.device("cpu"), group=group))
        self.optimizers = [optimizer_of(model) for model in self.models]
        runs: Any = ScheduleInterleaved1F1B if len(made) > 1 else Schedule1F1B
        self.schedule: Any = runs(
            made if len(made) > 1 else made[0], n_microbatches=4, loss_fn=loss_of, scale_grads=False
        )
        prepare_pipeline(self.schedule)

    def step(self, x: Tensor, y: Tensor) -> None:
        x, y = (tensor.chunk(self.parts)[self.part] for tensor in (x, y))
        inputs = (x,) if self.is_first else ()
        targets: dict[str, Any] = {"target": y} if self.is_last else {}
        self.schedule.step(*inputs, **targets)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return the states of all models and optimizers of this rank, by name."""
        merged: dict[str, Any] = {"model": {}, "optimizer": {}}
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            of_model, of_optimizer = get_state_dict(model, optimizer, options=FLAT)
            merged["model"] |= of_model
            merged["optimizer"] |= of_optimizer
        return merged

    def set_state(self, state: dict[str, Any]) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            names = {*model.state_dict()}
            values = {name: value for name, value in state["model"].items() if name in names}
            set_state_dict(
                model,
                optimizer,
                model_state_dict=values,
                optim_state_dict=state["optimizer"],
                options=FLAT,
            )


@pytest.mark.parametrize("kind", ["shards", "sharded optimizers"])
@pytest.mark.parametrize("by", ["dcp", "checkpointer"])
@on_ranks(4, timeout=120)
def test_a_pipeline_goes_on_with_other_stages(kind: str, by: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain: Any = Blocks(range(BLOCKS)).double()
    first_values = copy.deepcopy(plain)
    plain_optimizer = optimizer_of(plain)
    parts = 2

    def step_of_one_device(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, 16, 6, generator=generator, dtype=torch.float64)
        loss: Any = loss_of(plain(x), y)
        # a sum over the rows of a part, averaged over parts
        loss.div(parts).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        return x, y

    run = Run((2, 2), 2, kind, first_values)
    for number in range(2):
        run.step(*step_of_one_device(number))
    saved = run.state()
    if by == "dcp":
        dcp.save(saved, checkpoint_id=tmp_path / "saved")
    else:
        with Checkpointer(tmp_path / "steps") as checkpoints:
            checkpoints.save(1, saved)
    x, y = step_of_one_device(2)
    for ranks, stages in (((2, 2), 4), ((4, 1), 4)):
        resumed = Run(ranks, stages, kind, first_values)
        # the loss of all rows counts as the mean of two parts
        for model in resumed.models:
            for module in model.modules():
                if isinstance(module, (FSDPModule, ReplicateModule)):
                    module.set_gradient_divide_factor(parts)
        state = resumed.state()
        if by == "dcp":
            dcp.load(state, checkpoint_id=tmp_path / "saved")
        else:
            with Checkpointer(tmp_path / "steps") as checkpoints:
                assert checkpoints.load(state) == 1
        resumed.set_state(state)
        resumed.step(x, y)
        for model in resumed.models:
            same_weights(blocks_of(plain, model), model)


def blocks_of(plain: Any, model: Any) -> nn.Module:
    """Return the blocks of the model on one device that a stage has."""
    part = Blocks(range(0))
    part.blocks = nn.ModuleDict({number: plain.blocks[number] for number in model.blocks})
    return part
