"""Stages of torch's pipelining whose modules have styles; on real gloo ranks.

Covers: shoal_tp_styles/plan/parallelize.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from data_parallel_model import Block, same_gradients
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

MICROBATCHES = 4
SPLIT = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 cannot split the backward of an autograd.Function",
)
VS = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # whose last stage is on the first rank
SCHEDULES: list[Any] = ["Schedule1F1B", "ScheduleInterleaved1F1B"]
SCHEDULES += [pytest.param(name, marks=SPLIT) for name in ("ScheduleInterleavedZeroBubble", *VS)]
PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(4, timeout=120)
def test_steps_of_a_pipeline_are_those_of_one_device(name: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tensor"))
    mine, count = mesh.get_local_rank("stage"), 2 if name == "Schedule1F1B" else 4
    indices = (mine, 3 - mine) if name in VS else range(mine, count, 2)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(Block(6), Block(6)) for _ in range(count))).double()
    stages = []
    for index in indices:
        model: Any = parallelize_module(copy.deepcopy(plain[index]), mesh["tensor"], PLAN)
        stages.append(
            PipelineStage(model, index, count, torch.device("cpu"), group=mesh.get_group("stage"))
        )
    schedule: Any = getattr(pipelining, name)
    runner = schedule(
        stages if count == 4 else stages[0],
        n_microbatches=MICROBATCHES,
        loss_fn=loss_of,
        scale_grads=False,
    )
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, 16, 6, generator=generator, dtype=torch.float64)
        loss: Any = loss_of(plain(x), y)
        loss.backward()
        runner.step(*((x,) if mine == 0 else ()), **({"target": y} if count - 1 in indices else {}))
        for stage in stages:
            same_gradients(plain[stage.stage_index], stage.submod)
