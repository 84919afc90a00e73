"""Styles before and after `fully_shard` and `replicate` give the same bits; on real gloo ranks.

Covers: modules/owners.py, shoal_data_parallel/fully_shard.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from integration_tests.layers.styled_model import PLAN, models
from torch import nn

from data_parallel_model import (
    Fault,
    Model,
    backward_of_each,
    batch,
    full,
    loss_of,
    mesh_of,
    own,
    same_gradients,
    same_weights,
)
from shoal_data_parallel import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    replicate,
)
from shoal_dtensor import Shard, StridedShard
from shoal_dtensor.internal import local_shard
from shoal_mesh import CommDebugMode, DeviceMesh
from shoal_mesh.testing import counts, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    LoRA,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    StyleError,
    parallelize_module,
    unparallelize_module,
)

ADAPTERS = {
    "blocks.*.up": LoRA(base=ColwiseParallel(), rank=2, train_base=True),
    "blocks.*.down": LoRA(base=RowwiseParallel(), rank=2, train_base=True),
}


def sharded(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh["data"], **options)
    return fully_shard(model, mesh["data"], **options)


def both_orders(
    mesh: DeviceMesh, data: Callable[[Any], Any], make: Callable[[], Any] = Model, plan: Any = PLAN
) -> list[Any]:
    """The model with styles before data parallelism, and after."""
    built = []
    for styles_first in (True, False):
        torch.manual_seed(0)
        model = make().double()
        if not styles_first:
            data(model)
        torch.manual_seed(1)  # adapters draw
        parallelize_module(model, mesh["tensor"], plan)
        if styles_first:
            data(model)
        built.append(model)
    return built


def train_both(mesh: DeviceMesh, models: Sequence[Any]) -> None:
    """Three steps of each: the same collectives, layouts and bits."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        counted = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            with CommDebugMode() as collectives:
                loss_of(model, *own(mesh, *batch(step))).backward()
            optimizer.step()
            counted.append(counts(collectives))
        assert counted[0] == counted[1]
    for (name, one), (_, other) in zip(
        *(model.named_parameters() for model in models), strict=True
    ):
        assert getattr(one, "spec", None) is getattr(other, "spec", None), name
        assert torch.equal(full(one), full(other)), name
        assert torch.equal(full(one.grad), full(other.grad)), name


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "precision": {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "dim": {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
}


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(4)
def test_units_of_any_options(options: str) -> None:
    mesh = mesh_of(2, 2)
    train_both(mesh, both_orders(mesh, lambda model: sharded(model, mesh, **OPTIONS[options])))


MODELS: dict[str, tuple[dict[str, Any], Mapping[str, ParallelStyle]]] = {
    "tied": ({"tied": True}, PLAN),
    "recomputed": ({"recompute": False}, PLAN),
    "adapters": ({}, ADAPTERS),
}


@pytest.mark.parametrize("name", MODELS)
@on_ranks(4)
def test_units_of_any_model(name: str) -> None:
    mesh = mesh_of(2, 2)
    options, plan = MODELS[name]
    train_both(
        mesh, both_orders(mesh, lambda model: sharded(model, mesh), lambda: Model(**options), plan)
    )


@pytest.mark.parametrize("shard_optimizer", [False, True])
@on_ranks(4)
def test_replicas(shard_optimizer: bool) -> None:
    mesh = mesh_of(2, 2)
    train_both(
        mesh,
        both_orders(
            mesh, lambda model: replicate(model, mesh["data"], shard_optimizer=shard_optimizer)
        ),
    )


@on_ranks(4)
def test_styles_of_a_model_that_has_trained_come_and_go() -> None:
    mesh = mesh_of(2, 2)
    plain, model = models(mesh_of(4, 1))
    sharded(model, mesh)
    backward_of_each(plain, model, mesh)
    for change in (
        lambda m: parallelize_module(m, mesh["tensor"], PLAN),
        unparallelize_module,
        copy.deepcopy,
    ):
        model = change(model)
        # copies do not have gradients
        plain = copy.deepcopy(plain) if change is copy.deepcopy else plain
        same_gradients(plain, model)
        backward_of_each(plain, model, mesh)
        same_gradients(plain, model)
    parallelize_module(model, mesh["tensor"], PLAN)  # of the copy's own units
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)
    same_weights(plain, model)
    assert model.blocks[0].up.weight.placements == (StridedShard(0, split_factor=2), Shard(0))


@on_ranks(4)
def test_a_module_inside_of_a_unit_and_a_model_without_memory() -> None:
    mesh = mesh_of(2, 2)
    plain, model = models(mesh_of(4, 1))
    fully_shard(model, mesh["data"])
    parallelize_module(
        model.blocks[1], mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)
    with torch.device("meta"):
        empty: Any = Model()
    parallelize_module(sharded(empty, mesh), mesh["tensor"], PLAN)
    up = empty.blocks[0].up.weight
    assert up.is_meta
    assert (
        local_shard(up).shape
        == local_shard(parallelize_module(model, mesh["tensor"], {}).blocks[1].up.weight).shape
    )


@on_ranks(4)
def test_one_unit_at_a_time_is_whole() -> None:
    mesh = mesh_of(2, 2)
    model = sharded(Model(), mesh)
    whole: list[int] = []

    class Watching(ColwiseParallel):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            whole.append(sum(block.up.weight.shape == local_of(block) for block in model.blocks))
            return super()._apply(module, device_mesh)

    def local_of(block: Any) -> torch.Size:
        weight = block.up.weight
        return local_shard(weight).shape if hasattr(weight, "spec") else weight.shape

    parallelize_module(
        model, mesh["tensor"], {"blocks.*.up": Watching(), "blocks.*.down": RowwiseParallel()}
    )
    assert whole == [1, 1, 1]


class Failing(ColwiseParallel):
    """A style that raises when it is applied."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise Fault("apply")


@on_ranks(4)
def test_what_is_refused_leaves_the_units_as_they_were() -> None:
    mesh = mesh_of(2, 2)
    plain, model = models(mesh_of(4, 1))
    kept: Any = model.blocks[0].norm.weight
    for block in model.blocks:
        fully_shard(block, mesh["data"], ignored_params={kept})
    fully_shard(model, mesh["data"])
    with pytest.raises(LayoutError, match="use an axis for data or for styles"):
        parallelize_module(model, mesh["data"], PLAN)
    with pytest.raises(LayoutError, match="as ignored_params"):
        parallelize_module(model.blocks[0], mesh["tensor"], {"norm": SequenceParallel()})
    handle = model.blocks[1].up.weight.register_hook(lambda grad: grad)
    with pytest.raises(LayoutError, match="register hooks after all styles are applied"):
        parallelize_module(model, mesh["tensor"], PLAN)
    handle.remove()
    with model.no_sync():
        loss_of(model, *own(mesh, *batch(0))).backward()
    with pytest.raises(StyleError, match="keeps for a later reduction"):
        parallelize_module(model, mesh["tensor"], PLAN)
    model.zero_grad()
    with pytest.raises(Fault):
        parallelize_module(model, mesh["tensor"], {"blocks.1.up": Failing()})
    assert isinstance(model.blocks[1], FSDPModule)
    kept.requires_grad_(False)
    plain.blocks[0].norm.weight.requires_grad_(False)
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


@on_ranks(4)
def test_an_optimizer_of_parameters_that_were_replaced_raises() -> None:
    mesh = mesh_of(2, 2)
    changes: list[Callable[[Any], Any]] = [
        lambda model: parallelize_module(model, mesh["tensor"], PLAN),
        lambda model: sharded(model, mesh),
        lambda model: replicate(model, mesh["data"], shard_optimizer=True),
        lambda model: parallelize_module(model, mesh["tensor"], ADAPTERS),
    ]
    for change in changes:
        model = Model().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        change(model)
        with pytest.raises(StyleError, match="Construct the optimizer after"):
            optimizer.step()
    model = sharded(Model().double(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parallelize_module(model, mesh["tensor"], PLAN)
    with pytest.raises(StyleError, match="Construct the optimizer after"):
        optimizer.step()
    loss_of(model, *own(mesh, *batch(0))).backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
