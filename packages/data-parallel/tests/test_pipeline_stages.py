"""Stages of torch's pipelining whose modules are on data axes; on real gloo ranks.

Covers: {pipeline_stages,stage_borders}.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from data_parallel_model import Block, same_gradients
from shoal_data_parallel import (
    LayoutError,
    fully_shard,
    prepare_pipeline,
    reduce_after_last_microbatch,
    replicate,
)
from shoal_data_parallel.internal import units_of
from shoal_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    distribute_tensor,
    full_tensor,
)
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.internal import observing
from shoal_mesh.testing import counts, on_ranks

MICROBATCHES = 4
SPLIT = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 cannot split the backward of an autograd.Function",
)
LOOPS = [
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    pytest.param("ScheduleInterleavedZeroBubble", marks=SPLIT),
]
# The last stage is on the first rank.
VS = [pytest.param(name, marks=SPLIT) for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def shard(model: Any, mesh: DeviceMesh) -> None:
    for block in model:
        fully_shard(block, mesh["data"])
    fully_shard(model, mesh["data"])


MADE: dict[str, Callable[[Any, DeviceMesh], object]] = {
    "shards": shard,
    "replicas": lambda model, mesh: replicate(model, mesh["data"]),
    "sharded optimizers": lambda model, mesh: replicate(model, mesh["data"], shard_optimizer=True),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("name", [*LOOPS, *VS])
@on_ranks(4, timeout=120)
def test_steps_of_a_pipeline_are_those_of_one_device(name: str, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    mine, count = mesh.get_local_rank("stage"), 2 if name == "Schedule1F1B" else 4
    indices = (
        (mine, 3 - mine)
        if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        else range(mine, count, 2)
    )
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(Block(6), Block(6)) for _ in range(count))).double()
    stages = []
    for index in indices:
        model: Any = copy.deepcopy(plain[index])
        MADE[kind](model, mesh)
        stages.append(
            PipelineStage(model, index, count, torch.device("cpu"), group=mesh.get_group("stage"))
        )
        if kind == "shards":
            reduce_after_last_microbatch(stages[-1])
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
        # gradients are averaged over the data axis
        loss.div(2).backward()
        x, y = (t.chunk(2)[mesh.get_local_rank("data")] for t in (x, y))
        # Its hooks do not allow torch.autograd.grad, with which the first step and zero-bubble
        # schedules work.
        counts_collectives = number == 1 and name == "Schedule1F1B" and kind == "shards"
        with CommDebugMode() if counts_collectives else nullcontext() as counted:
            runner.step(
                *((x,) if mine == 0 else ()), **({"target": y} if count - 1 in indices else {})
            )
        if counted is not None:
            assert counts(counted)["reduce_scatter"] == 2  # of two blocks, for all microbatches
        for stage in stages:
            same_gradients(plain[stage.stage_index], stage.submod)


# All-gathers of a rank in a step of 8 microbatches, with 2 blocks a stage: units stay gathered from
# forward to backward (`reshard_after_forward=False`), or not. Torch's `fully_shard` gathers
# as often.
#
# Peaks of a step of ScheduleLoopedBFS that keeps units gathered (blocks of 256 features, 2 a
# stage), by torch.profiler: 10.265 MB on ranks 0 and 1, 10.279 on 2 and 3, in backward. Torch's
# backward has the same peaks or 11.8, where a gather's buffer is freed late, and its gathers have
# peaks of 10.541. VmHWM of the process is 0.1 MB higher (9.86 beside 9.75) in the second step only;
# from the third step on both are 9.6 to 9.8. Counted allocations are equal, so it is no tensor that
# could be freed.
GATHERS: dict[str, tuple[int, int]] = {
    "ScheduleGPipe": (2, 18),
    "Schedule1F1B": (2, 18),
    "ScheduleInterleaved1F1B": (4, 36),
    "ScheduleLoopedBFS": (4, 36),
    "ScheduleInterleavedZeroBubble": (4, 36),
    "ScheduleZBVZeroBubble": (4, 36),
    "ScheduleDualPipeV": (4, 36),
}
SPLITS = ("ZeroBubble", "DualPipe")


KINDS: dict[str, Callable[[Any, DeviceMesh], object]] = {
    **MADE,
    "shards of replicas": lambda model, mesh: fully_shard(model, mesh),
    "blocks": lambda model, mesh: [fully_shard(block, mesh["data"]) for block in model],
}


class Pipeline:
    """A rank's stages of a model of blocks of 6 features, and the same model on one device."""

    def __init__(self, name: str, shard_stage: Callable[[Any], object], mesh: DeviceMesh) -> None:
        position = mesh.get_local_rank("stage")
        count = 2 if name in ("Schedule1F1B", "ScheduleGPipe") else 4
        is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        indices = [position, 3 - position] if is_v else [*range(position, count, 2)]
        torch.manual_seed(0)
        blocks = (nn.Sequential(Block(6), Block(6)) for _ in range(count))
        self.plain = nn.Sequential(*blocks).double()
        self.mesh = mesh
        self.is_first = position == 0
        self.is_last = count - 1 in indices
        group = mesh.get_group("stage")
        self.stages = []
        for index in indices:
            model = copy.deepcopy(self.plain[index])
            shard_stage(model)
            self.stages.append(PipelineStage(model, index, count, torch.device("cpu"), group=group))

    def schedule(
        self, name: str, microbatches: int, *, scale_grads: bool = False, **options: Any
    ) -> Any:
        kind: Any = getattr(pipelining, name)
        stages = self.stages if len(self.stages) > 1 else self.stages[0]
        return kind(
            stages,
            n_microbatches=microbatches,
            loss_fn=loss_of,
            scale_grads=scale_grads,
            **options,
        )

    def step(self, schedule: Any, number: int, rows: int = 32, **options: Any) -> None:
        """Run one step of both: gradients are averaged over the data axis."""
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, rows, 6, generator=generator, dtype=torch.float64)
        loss: Any = loss_of(self.plain(x), y)
        loss.div(2).backward()
        x, y = (t.chunk(2)[self.mesh.get_local_rank("data")] for t in (x, y))
        inputs = (x,) if self.is_first else ()
        targets: dict[str, Any] = {"target": y} if self.is_last else {}
        schedule.step(*inputs, **targets, **options)

    def check_gradients(self) -> None:
        for stage in self.stages:
            same_gradients(self.plain[stage.stage_index], stage.submod)


def reductions(mode: CommDebugMode) -> int:
    """Count the reductions over data axes. Schedules of torch 2.15 reduce votes over the stages."""
    kinds = ("all_reduce", "reduce_scatter_tensor")
    axes = ("data", "copies", "shards")
    return sum(record.op in kinds and record.axes[0] in axes for record in mode.trace)


@pytest.mark.parametrize("name", GATHERS)
@on_ranks(4, timeout=120)
def test_prepared_schedules_gather_as_often_as_torch(name: str) -> None:
    if torch.__version__ < "2.12" and any(word in name for word in SPLITS):
        pytest.skip("torch 2.11 cannot split the backward of an autograd.Function")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    found = []
    for reshards in (False, True):

        def shard_blocks(model: Any, reshards: bool = reshards) -> None:
            for block in model:
                fully_shard(block, mesh["data"], reshard_after_forward=reshards)
            fully_shard(model, mesh["data"], reshard_after_forward=reshards)

        pipeline = Pipeline(name, shard_blocks, mesh)
        schedule = pipeline.schedule(name, 8)
        prepare_pipeline(schedule)
        for number in range(2):
            seen: list[str] = []

            def note(event: Any, seen: list[str] = seen) -> None:
                seen.append(event.op)

            with observing(note):
                pipeline.step(schedule, number)
            pipeline.check_gradients()
        found.append(seen.count("all_gather_into_tensor"))
        blocks = 2 * len(pipeline.stages)
        assert seen.count("reduce_scatter_tensor") == blocks
        held = [unit for stage in pipeline.stages for unit in units_of(stage.submod)]
        assert not any(unit.current.has_values for unit in held)
    assert tuple(found) == GATHERS[name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GATHERS)
@on_ranks(4, timeout=120)
def test_prepared_stages_of_all_kinds_reduce_once(name: str, kind: str) -> None:
    """Replicas reduced in every microbatch, in every part of a backward that is split.

    CommDebugMode raised in each of these schedules, and the other ranks waited for the time-out.
    """
    if torch.__version__ < "2.12" and any(word in name for word in SPLITS):
        pytest.skip("torch 2.11 cannot split the backward of an autograd.Function")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    axes = mesh
    if kind == "shards of replicas":
        axes = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "copies", "shards"))
        axes = axes["copies", "shards"]
    pipeline = Pipeline(name, lambda model: KINDS[kind](model, axes), mesh)
    schedule = pipeline.schedule(name, MICROBATCHES)
    prepare_pipeline(schedule)
    for number in range(2):
        with CommDebugMode() as counted:
            pipeline.step(schedule, number)
        pipeline.check_gradients()
        units = 2 if kind in ("shards", "blocks") else 1
        assert reductions(counted) == units * len(pipeline.stages)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4, timeout=120)
def test_gradients_of_steps_that_are_not_finalized_are_kept(kind: str) -> None:
    """Torch 2.15's `step(finalize_gradients=False)`, on every torch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    axes = mesh
    if kind == "shards of replicas":
        axes = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "copies", "shards"))
        axes = axes["copies", "shards"]
    names = ["Schedule1F1B", "ScheduleInterleaved1F1B"]
    if torch.__version__ >= "2.12":
        # its backwards put zeros into `.grad`
        names.append("ScheduleInterleavedZeroBubble")
    for name in names:
        pipeline = Pipeline(name, lambda model: KINDS[kind](model, axes), mesh)
        schedule = pipeline.schedule(name, MICROBATCHES, scale_grads=True)
        prepare_pipeline(schedule)
        for number in range(2):
            with CommDebugMode() as counted:
                pipeline.step(schedule, number, finalize_gradients=False)
            assert reductions(counted) == 0
            params = [p for stage in pipeline.stages for p in stage.submod.parameters()]
            for param in params:
                # plain parameters get zeros
                assert param.grad is None or (kind == "replicas" and not param.grad.any())
        pipeline.step(schedule, 2)
        # and a step of its own afterwards
        pipeline.step(schedule, 3)
        for param in pipeline.plain.parameters():
            assert param.grad is not None
            param.grad /= MICROBATCHES
        pipeline.check_gradients()


# Arguments that schedules of torch 2.15 have.
NEW_OPTIONS: dict[str, dict[str, Any]] = {
    "reductions are awaited later": {"defer_reduce_grad_wait": True},
    "one stage is gathered": {"max_active_stages": 1},
    "gathers as late as possible": {"unshard_lookahead": "auto"},
    "few sends in flight": {"max_outstanding_sends": 1},
}


@pytest.mark.skipif(
    "unshard_lookahead" not in signature(pipelining.ScheduleInterleaved1F1B).parameters,
    reason="schedules have these arguments from torch 2.15 on",
)
@pytest.mark.parametrize("option", NEW_OPTIONS)
@on_ranks(4, timeout=120)
def test_prepared_schedules_take_the_arguments_of_torch_2_15(option: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    for name in ("ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"):
        pipeline = Pipeline(name, lambda model: shard(model, mesh), mesh)
        schedule = pipeline.schedule(name, MICROBATCHES, **NEW_OPTIONS[option])
        prepare_pipeline(schedule)
        for number in range(2):
            with CommDebugMode() as counted:
                pipeline.step(schedule, number)
            pipeline.check_gradients()
            assert reductions(counted) == 2 * len(pipeline.stages)


@on_ranks(4, timeout=120)
def test_gradients_of_plain_stages_are_scaled_once() -> None:
    """Gradients of a step that was not finalized were scaled in it, and again in the next one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    pipeline = Pipeline("Schedule1F1B", lambda model: None, mesh)
    schedule = pipeline.schedule("Schedule1F1B", MICROBATCHES, scale_grads=True)
    prepare_pipeline(schedule)
    pipeline.step(schedule, 0, finalize_gradients=False)
    pipeline.step(schedule, 1)
    for param in pipeline.plain.parameters():
        assert param.grad is not None
        param.grad /= MICROBATCHES
    for param in pipeline.stages[0].submod.parameters():
        assert param.grad is not None
        torch.distributed.all_reduce(param.grad, group=mesh.get_group("data"))
        param.grad /= 2
    pipeline.check_gradients()


@pytest.mark.parametrize("prepares", [True, False])
@on_ranks(4, timeout=120)
def test_steps_without_zero_grad_scale_their_own_gradients(prepares: bool) -> None:
    """Gradients of an earlier step were scaled a second time."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    pipeline = Pipeline("Schedule1F1B", lambda model: shard(model, mesh), mesh)
    schedule = pipeline.schedule("Schedule1F1B", 4, scale_grads=True)
    if prepares:
        # again changes nothing
        prepare_pipeline(schedule)
        prepare_pipeline(schedule)
    reduce_after_last_microbatch(pipeline.stages[0])
    for number in range(3):
        pipeline.step(schedule, number)
    for param in pipeline.plain.parameters():
        assert param.grad is not None
        param.grad /= 4
    pipeline.check_gradients()


@pytest.mark.parametrize("border", ["S(0) to S(1)", "P to R", "R to S(0)"])
@on_ranks(4, timeout=120)
def test_dtensors_cross_the_border_of_two_meshes(border: str) -> None:
    first, second = (
        DeviceMesh("cpu", ranks, mesh_dim_names=("tensor",)) for ranks in ([0, 1], [2, 3])
    )
    layouts: dict[str, tuple[Placement, Placement]] = {
        "S(0) to S(1)": (Shard(0), Shard(1)),
        "P to R": (Partial(), Replicate()),
        "R to S(0)": (Replicate(), Shard(0)),
    }
    sends, takes = layouts[border]
    torch.manual_seed(0)
    # rows and features are uneven
    plain: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain(x).square().sum().backward()
    rank = torch.distributed.get_rank()

    def elsewhere(mesh: DeviceMesh, placement: Placement) -> Any:
        """What a rank of the other stage has of the hidden values: their layout."""
        spec = Spec(mesh, [placement], (5, 7), None, torch.float64)
        return DTensor(torch.zeros(spec.local_shape, dtype=torch.float64), spec)

    hidden: Any = elsewhere(first, sends).requires_grad_()
    weight: Any = None
    if rank < 2:
        weight = distribute_tensor(plain[0].weight.detach(), first, [Shard(1)]).requires_grad_()
        hidden = distribute_tensor(x, first, [Shard(1)]) @ weight.t()
        hidden = hidden if sends == Partial() else hidden.redistribute(first, [sends])
    arrived = hidden.redistribute(second, [takes])
    grad = elsewhere(second, takes)
    if rank >= 2:
        start = arrived.detach().requires_grad_()
        weight = distribute_tensor(plain[2].weight.detach(), second, [Shard(1)]).requires_grad_()
        biases: list[Any] = [
            distribute_tensor(plain[i].bias.detach(), second, [Replicate()]) for i in (0, 2)
        ]
        ((start + biases[0]).tanh() @ weight.t() + biases[1]).square().sum().backward()
        grad = start.grad
    arrived.backward(grad)
    torch.testing.assert_close(weight.grad.full_tensor(), plain[0 if rank < 2 else 2].weight.grad)


def test_a_stage_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(LayoutError, match="expected a stage whose submod, or a module"):
        reduce_after_last_microbatch(SimpleNamespace(submod=nn.Linear(2, 2)))


def test_what_has_no_stages_is_refused() -> None:
    for schedule in (object(), SimpleNamespace(_stages=[])):
        with pytest.raises(LayoutError, match="prepare_pipeline: expected"):
            prepare_pipeline(schedule)


class StageInLayout(nn.Module):
    """A Linear that may return DTensors in a layout."""

    def __init__(self, layout: Placement | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)
        self.layout = layout

    def forward(self, x: Any) -> Any:
        out = self.linear(x.tanh())
        if self.layout is None:
            return out
        if self.layout == Partial():
            # a sum over features that are sharded
            assert out.placements == (Partial(),)
            return out
        return out.redistribute(placements=[self.layout])


@pytest.mark.parametrize("chooses_mesh", [False, True])
@pytest.mark.parametrize("layout", [Shard(0), Shard(1), Replicate(), Partial()])
@on_ranks(4, timeout=120)
def test_dtensors_cross_the_border_of_stages(layout: Placement, chooses_mesh: bool) -> None:
    """The ranks behind the border waited for the time-out of their group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tensor"))
    index = mesh.get_local_rank("stage")
    torch.manual_seed(0)
    plain = nn.Sequential(StageInLayout(), StageInLayout()).double()
    model: Any = copy.deepcopy(plain[index])
    if index == 0:
        model.layout = layout
    dim = 1 if layout == Partial() else 0
    weight = distribute_tensor(model.linear.weight.detach(), mesh["tensor"], [Shard(dim)])
    model.linear.weight = nn.Parameter(weight)
    group = mesh.get_group("stage")
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=group)

    def loss_of_dtensors(output: Any, target: Tensor) -> Tensor:
        loss: Any = (output - target).square().sum()
        whole: Tensor = full_tensor(loss)
        return whole

    schedule: Any = pipelining.Schedule1F1B(
        stage, n_microbatches=2, loss_fn=loss_of_dtensors, scale_grads=False
    )
    axes_asked_for: list[tuple[str, ...]] = []

    def choose_mesh(axes: tuple[str, ...]) -> DeviceMesh:
        axes_asked_for.append(axes)
        return mesh[axes]

    prepare_pipeline(schedule, get_mesh=choose_mesh if chooses_mesh else None)
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        # rows are uneven over the ranks of a stage
        x, y = torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)
        loss: Any = loss_of(plain(x), y)
        loss.backward()
        replicated = distribute_tensor(x, mesh["tensor"], [Replicate()])
        if index == 0:
            schedule.step(replicated)
        else:
            schedule.step(target=distribute_tensor(y, mesh["tensor"], [Replicate()]))
        same_gradients(plain[index], model)
    receives = index == 1
    expected_axes = {("tensor",)} if chooses_mesh and receives else set()
    assert {*axes_asked_for} == expected_axes
