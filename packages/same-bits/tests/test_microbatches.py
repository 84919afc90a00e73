"""Gradients of microbatches and of pipeline stages have the bits of one pass.

Covers: microbatches.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from sequence_parallel_mlp import NormMLP
from shoal_data_parallel import MixedPrecisionPolicy, fully_shard, replicate
from shoal_dtensor import full_tensor
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks
from shoal_same_bits import accumulate_in_tree, accumulate_stage_in_tree, invariant_arithmetic
from shoal_tp_styles import (
    ColwiseParallel,
    RowwiseParallel,
    StyleError,
    TiedWeightError,
    parallelize_module,
)

MICROBATCHES, BATCH, WIDTH = 4, 16, 16
PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(NormMLP(2 * WIDTH)) for _ in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def batch() -> tuple[Tensor, ...]:
    return torch.randn(2, BATCH, 8, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()


def parallel(model: Any, mesh: DeviceMesh, *, sharded: bool = False) -> Any:
    parallelize_module(model, mesh["tensor"], PLAN)
    return (fully_shard if sharded else replicate)(model, mesh["data"])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Any] = {name: param.grad for name, param in model.named_parameters()}
    return {name: full_tensor(grad) for name, grad in found.items()}


def one_pass(count: int) -> list[dict[str, Tensor]]:
    """The gradients of `count` blocks, of one pass on one rank.

    The mean over the two ranks of a data axis halves.
    """
    alone = init_device_mesh("cpu", (4, 1, 1), mesh_dim_names=("copies", "data", "tensor"))[
        "data", "tensor"
    ]
    model = nn.Sequential(*(parallel(block, alone) for block in blocks(count)))
    x, y = batch()
    loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return [gradients(block) for block in model]


def differing(want: dict[str, Tensor], got: dict[str, Tensor]) -> list[str]:
    return [name for name in want if not torch.equal(want[name], got[name])]


@on_ranks(4, timeout=120)
def test_microbatches_have_the_bits_of_one_pass() -> None:
    x, y = batch()
    with invariant_arithmetic():
        (want,) = one_pass(1)
        for shape, sharded in (((1, 4), False), ((2, 2), True), ((4, 1), False)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
            model, rank = parallel(blocks(1)[0], mesh, sharded=sharded), mesh.get_local_rank("data")
            parts = [*zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)]
            for part in accumulate_in_tree(model, parts):
                own, target = (t.chunk(shape[0])[rank] for t in part)
                (loss_of(model(own), target) * shape[0]).backward()  # type: ignore[no-untyped-call]
            assert differing(want, gradients(model)) == [], shape


@pytest.mark.parametrize(
    "name",
    [
        "ScheduleGPipe",
        "Schedule1F1B",
        pytest.param(
            "ScheduleInterleavedZeroBubble",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.12",
                reason="torch 2.11 cannot split the backward of an autograd.Function",
            ),
        ),
    ],
)
@on_ranks(4, timeout=120)
def test_a_pipeline_has_the_bits_of_one_pass(name: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("stage", "data", "tensor"))
    mine, count = mesh.get_local_rank("stage"), 4 if "Interleaved" in name else 2
    stages = []
    with invariant_arithmetic():
        want = one_pass(count)
        for index in range(mine, count, 2):
            model = parallelize_module(copy.deepcopy(blocks(count)[index]), mesh["tensor"], PLAN)
            stages.append(
                PipelineStage(
                    model, index, count, torch.device("cpu"), group=mesh.get_group("stage")
                )
            )
            accumulate_stage_in_tree(stages[-1], MICROBATCHES)
        schedule: Any = getattr(pipelining, name)
        step = schedule(
            stages if count == 4 else stages[0],
            n_microbatches=MICROBATCHES,
            loss_fn=loss_of,
            scale_grads=False,
        )
        x, y = batch()
        for _ in range(2):
            step.step(*((x,) if mine == 0 else ()), **({"target": y} if mine == 1 else {}))
            for stage in stages:
                assert differing(want[stage.stage_index], gradients(stage.submod)) == []
                stage.submod.zero_grad()


def test_what_is_no_tree_is_refused() -> None:
    with fake_world(2):
        mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), torch.ones(4, 2, 8)
        with pytest.raises(StyleError, match="inside invariant_arithmetic"):
            accumulate_in_tree(nn.Linear(8, 8), x.chunk(4))
        with invariant_arithmetic():
            model: Any = fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh)
            with pytest.raises(StyleError, match=r"number of microbatches .* got 3"):
                accumulate_in_tree(model, [x, x, x])
            with (
                pytest.raises(StyleError, match="fully_shard accumulates gradients"),
                model.no_sync(),
            ):
                for part in accumulate_in_tree(model, x.chunk(4)):
                    model(part).sum().backward()
            model.reduce_gradients()
            half = fully_shard(
                nn.Linear(8, 8), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            )
            with pytest.raises(StyleError, match="bfloat16, but gradients of passes"):
                accumulate_in_tree(half, x.chunk(4))
            with pytest.raises(StyleError, match="drop them first"):
                accumulate_in_tree(model, x.chunk(4))
            tied: Any = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
            tied[1].weight = tied[0].weight
            with pytest.raises(TiedWeightError, match="weight"):
                accumulate_in_tree(tied, x.chunk(4))


def test_passes_of_a_stage_come_in_order() -> None:
    class Stage:
        has_backward, submod = True, nn.Linear(2, 2)

        def backward_one_chunk(self, number: int, **_: Any) -> None:
            self.submod.weight.grad = torch.ones(2, 2)

        def backward_weight_one_chunk(self, number: int, **_: Any) -> None:
            """Nothing: the order is checked."""

        def perform_reduce_grad(self, factor: int) -> None:
            """Nothing to reduce."""

    with invariant_arithmetic():
        stage: Any = Stage()
        accumulate_stage_in_tree(stage, 4)
        stage.backward_one_chunk(0)
        with pytest.raises(StyleError, match="the backward of microbatch 2 ran as number 1"):
            stage.backward_one_chunk(2)
        with pytest.raises(StyleError, match="got 1"):
            stage.perform_reduce_grad(1)
