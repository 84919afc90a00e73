"""Prepared pipelines whose stages have data axes beside axes of styles, or of replicas.

The tests run on real gloo ranks.

Covers: shoal_data_parallel/pipeline_stages.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from data_parallel_model import Block, same_gradients
from moe_models import WIDTH, mixture
from shoal_data_parallel import fully_shard, prepare_pipeline, replicate
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import ColwiseParallel, ExpertParallel, RowwiseParallel, parallelize_module

MICROBATCHES = 4
SPLIT = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 cannot split the backward of an autograd.Function",
)
# one stage per rank; two stages, the last one on the first rank, and a split backward
SCHEDULES: list[Any] = ["Schedule1F1B", pytest.param("ScheduleDualPipeV", marks=SPLIT)]
PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


class MixtureBlock(nn.Module):
    """A residual mixture of experts, whose values stay small over many blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = mixture("packed", 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mixture(self.norm(x)).tanh()
        return out


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def shard_styled(model: Any, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tensor"], PLAN)
    for block in model:
        fully_shard(block, mesh["data"])
    fully_shard(model, mesh["data"])


def shard_with_copies(model: Any, mesh: DeviceMesh) -> None:
    for block in model:
        fully_shard(block, mesh["data", "tensor"])
    fully_shard(model, mesh["data", "tensor"])


def divide_optimizers(model: Any, mesh: DeviceMesh) -> None:
    """Shard over replicas what optimizers update."""
    for module in (*model, model):
        fully_shard(module, mesh["data", "tensor"], shard_optimizer=True)


def shard_optimizers(model: Any, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tensor"], PLAN)
    replicate(model, mesh["data"], shard_optimizer=True)


def shard_experts(model: Any, mesh: DeviceMesh) -> None:
    """Have each rank's rows choose among experts on all ranks of an axis."""
    rows = mesh["data", "tensor"].flatten("rows")
    for block in model:
        parallelize_module(block, mesh["tensor"], {"mixture.experts": ExpertParallel()})
        fully_shard(block.mixture.experts, mesh["data"])
        fully_shard(block, rows)
        for unit in (block, block.mixture.experts):
            # the loss is a sum over all rows
            unit.set_gradient_divide_factor(1)


# by kind: how stages are sharded, and the number of reductions in a step of one stage
KINDS: dict[str, tuple[Callable[[Any, DeviceMesh], None], int]] = {
    "shards and styles": (shard_styled, 2),
    "shards of replicas": (shard_with_copies, 2),
    "optimizers divided by replicas": (divide_optimizers, 2),
    "sharded optimizers and styles": (shard_optimizers, 1),
    "experts": (shard_experts, 4),
}


class Pipeline:
    """Stages of two blocks on ranks along "stage", and the same model on one device."""

    def __init__(self, schedule: str, kind: str, mesh: DeviceMesh) -> None:
        position = mesh.get_local_rank("stage")
        count = 2 if schedule == "Schedule1F1B" else 4
        indices = [*range(position, count, 2)]
        if schedule == "ScheduleDualPipeV":
            indices = [position, 3 - position]
        torch.manual_seed(0)
        self.width = WIDTH if kind == "experts" else 6
        self.plain = nn.Sequential(*(self._blocks(kind) for _ in range(count))).double()
        self.is_first = position == 0
        self.is_last = count - 1 in indices
        # batches are divided over "data"; with experts over all ranks of a stage
        axes = mesh["data", "tensor"]
        self.parts, self.part = mesh["data"].size(), mesh.get_local_rank("data")
        if kind in ("experts", "shards of replicas", "optimizers divided by replicas"):
            self.parts, self.part = axes.size(), axes.flatten("rows").get_local_rank()
        self.divisor = 1 if kind == "experts" else self.parts
        self.stages = []
        for index in indices:
            model: Any = copy.deepcopy(self.plain[index])
            KINDS[kind][0](model, mesh)
            group = mesh.get_group("stage")
            self.stages.append(PipelineStage(model, index, count, torch.device("cpu"), group=group))
        runs: Any = getattr(pipelining, schedule)
        self.schedule = runs(
            self.stages if count == 4 else self.stages[0],
            n_microbatches=MICROBATCHES,
            loss_fn=loss_of,
            scale_grads=False,
        )

    @staticmethod
    def _blocks(kind: str) -> nn.Module:
        if kind == "experts":
            return nn.Sequential(MixtureBlock(), MixtureBlock())
        return nn.Sequential(Block(6), Block(6))

    def step(self, number: int, **options: Any) -> None:
        """Run one step of both."""
        generator = torch.Generator().manual_seed(number)
        size = 2, 8 * self.parts, self.width
        x, y = torch.randn(size, generator=generator, dtype=torch.float64)
        loss: Any = loss_of(self.plain(x), y)
        loss.div(self.divisor).backward()
        x, y = (t.chunk(self.parts)[self.part] for t in (x, y))
        inputs = (x,) if self.is_first else ()
        targets: dict[str, Any] = {"target": y} if self.is_last else {}
        self.schedule.step(*inputs, **targets, **options)

    def check_gradients(self) -> None:
        for stage in self.stages:
            same_gradients(self.plain[stage.stage_index], stage.submod)


def _reduces_parameters(record: Any) -> bool:
    """Return whether a collective reduces gradients over data axes."""
    reduces = record.op in ("reduce_scatter_tensor", "all_reduce")
    return reduces and not {"data", "rows"}.isdisjoint(record.axes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(8, timeout=120)
def test_composed_stages_reduce_once_per_finalized_step(name: str, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "data", "tensor"))
    pipeline = Pipeline(name, kind, mesh)
    prepare_pipeline(pipeline.schedule)
    pipeline.step(0)
    pipeline.check_gradients()
    pipeline.step(1, finalize_gradients=False)
    with CommDebugMode() as counted:
        pipeline.step(2)
    # all three steps
    pipeline.check_gradients()
    reductions = [record for record in counted.trace if _reduces_parameters(record)]
    assert len(reductions) == KINDS[kind][1] * len(pipeline.stages)
