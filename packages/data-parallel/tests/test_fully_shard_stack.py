"""`fully_shard` with the rest of a training stack: compiler, initialization, checkpoints, dtypes.

The tests run on real gloo ranks.

Covers: {reduction,sharded_parameters,sharding,schedule}.py.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from data_parallel_checks import units_load_on_other_degrees, units_start_as_one_device
from data_parallel_model import (
    Model,
    OptionalFirst,
    batch,
    full,
    loss_of,
    mesh_of,
    own,
    same_gradients,
    shard_blocks_and_root,
    two_equal_models,
)
from shoal_data_parallel import StyleError, fully_shard, replicate
from shoal_data_parallel.units.unit import Unit, UnitState, unit_of
from shoal_dtensor import Placement, Replicate, Shard, distribute_tensor
from shoal_dtensor.internal import ShardsInFlight, redistribute_shards
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks


def build(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Model(6, 2).double()


@pytest.mark.parametrize("how", ["wrapped", "in place", "in place afterwards", "all of it"])
@on_ranks(4, timeout=120)
def test_compiled_units(how: str) -> None:
    mesh = mesh_of(4, 1)
    plain, model = build(), build()
    for i, block in enumerate(model.blocks):
        if how == "wrapped":
            model.blocks[i] = torch.compile(block, backend="aot_eager", fullgraph=True)
        elif how == "in place":
            block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(model.blocks[i], mesh["data"])
        if how == "in place afterwards":
            block.compile(backend="aot_eager", fullgraph=True)
    fully_shard(model, mesh["data"])
    called: Any = torch.compile(model, backend="aot_eager") if how == "all of it" else model
    for number in range(2):
        tokens, targets = batch(number)
        loss_of(plain, tokens, targets).backward()
        loss_of(called, *own(mesh, tokens, targets)).backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_initialization_on_the_meta_device_is_that_of_one_device() -> None:
    plain = Model(6, 2)
    with torch.device("meta"):
        model: Any = Model(6, 2)
    units_start_as_one_device(plain, shard_blocks_and_root(model, mesh_of(4, 1)["data"]))


@on_ranks(4)
def test_checkpoints_are_loaded_on_other_degrees() -> None:
    mesh = mesh_of(4, 1)
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))
    others = [
        shard_blocks_and_root(build(1), mesh_of(2, 2)["data"]),
        shard_blocks_and_root(build(1), replicated),
        build(1),
    ]
    units_load_on_other_degrees(shard_blocks_and_root(build(), mesh["data"]), mesh, others)


@pytest.mark.parametrize("replicates", [False, True])
@pytest.mark.parametrize(
    "placed",
    [(Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(1))],
    ids=str,
)
@on_ranks(4)
def test_gradients_that_inputs_leave_partial_or_sharded(
    placed: tuple[Placement, Placement], replicates: bool
) -> None:
    """Parameters that are replicated along "tensor".

    They are kept ones, and those that only one data-parallel rank has.
    """
    mesh = mesh_of(2, 2)
    plain, model = two_equal_models(lambda: OptionalFirst(4))
    for layer in (model.first, model.second):
        for name, param in [*layer.named_parameters()]:
            value = distribute_tensor(param.detach(), mesh["tensor"], [Replicate()])
            setattr(layer, name, nn.Parameter(value))
    parallel: Any = (
        replicate(model, mesh["data"]) if replicates else fully_shard(model, mesh=mesh["data"])
    )
    rank, generator = mesh.get_local_rank("data"), torch.Generator().manual_seed(0)
    for last, placement in enumerate(placed):
        parts = torch.randn(8, 4, dtype=torch.float64, generator=generator).chunk(2)
        for at, part in enumerate(parts):
            plain(part, at == last).square().mean().div(2).backward()
        parallel.set_requires_gradient_sync(bool(last))
        rows = distribute_tensor(parts[rank], mesh["tensor"], [placement])
        parallel(rows, rank == last).square().mean().backward()
    same_gradients(plain, parallel)


@on_ranks(4)
def test_sharding_changes_no_bit_of_replication() -> None:
    mesh = mesh_of(4, 1)
    models = [shard_blocks_and_root(build(), mesh["data"]), replicate(build(), mesh["data"])]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for number in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, *own(mesh, *batch(number))).backward()
            optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(full(one), full(other))
        assert torch.equal(full(one.grad), full(other.grad))


@on_ranks(4)
def test_a_model_that_changes_its_dtype() -> None:
    mesh = mesh_of(4, 1)
    plain, model = build().float(), shard_blocks_and_root(build(), mesh["data"])
    model(batch(0)[0])  # the outermost unit stays gathered
    model.float()
    tokens, targets = batch(0)
    assert model(tokens).dtype == torch.float32
    loss_of(plain, tokens, targets).backward()
    loss_of(model, *own(mesh, tokens, targets)).backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_modules_that_are_gathered_ahead_are_those_that_were_named() -> None:
    mesh = mesh_of(4, 1)
    model = shard_blocks_and_root(Model(6, 3).double(), mesh["data"])
    plain = shard_blocks_and_root(Model(6, 3).double(), mesh["data"])
    plain.load_state_dict(model.state_dict())
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    second.set_modules_to_forward_prefetch([])
    third.set_modules_to_backward_prefetch([second, first])
    with pytest.raises(StyleError, match="got Linear"):
        first.set_modules_to_backward_prefetch([nn.Linear(2, 2)])
    numbers = {unit_of(block): i for i, block in enumerate(model.blocks)}
    seen: list[str] = []
    begin = Unit.start_gathering

    def start(unit: Unit, *versions: Any) -> None:
        before = unit.state
        begin(unit, *versions)
        if unit.state is UnitState.GATHERING and unit.state is not before and unit in numbers:
            seen.append(f"gather {numbers[unit]}")

    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: seen.append(f"forward {i}"))
        block.register_full_backward_pre_hook(lambda *_, i=i: seen.append(f"backward {i}"))
    for step in range(2):
        seen.clear()
        with patch.object(Unit, "start_gathering", start):
            loss_of(model, *own(mesh, *batch(step))).backward()
        loss_of(plain, *own(mesh, *batch(step))).backward()
        at = {what: i for i, what in reversed(list(enumerate(seen)))}
        assert at["gather 1"] < at["gather 2"] < at["forward 0"] < at["forward 1"]
        again = seen[at["forward 2"] :]
        assert again.index("gather 0") < again.index("backward 2") < again.index("backward 1")
        assert len(seen) == 12
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad.to_local(), expected.grad.to_local())


@on_ranks(4)
def test_collectives_are_under_way_while_other_units_compute() -> None:
    mesh = mesh_of(4, 1)
    model = shard_blocks_and_root(Model(6, 3).double(), mesh["data"])
    seen: list[tuple[str, str]] = []
    under_way: list[str] = []

    def recorded(shards: Any, moves: Any) -> Any:
        flight = redistribute_shards(shards, moves)
        kind = "reduction" if any(src.partials for src, _ in moves) else "gather"
        under_way.append(kind)
        wait = flight.wait

        def waited(*args: Any) -> Any:
            if kind in under_way:
                under_way.remove(kind)
            return wait(*args)

        return Mock(wait=waited, poll=lambda: None, reach_last_round=lambda: False)

    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(("forward", ",".join(under_way))))
        block.register_full_backward_pre_hook(
            lambda *_: seen.append(("backward", ",".join(under_way)))
        )
    model.head.register_full_backward_pre_hook(
        lambda *_: seen.append(("head", ",".join(under_way)))
    )
    where = fully_shard.__module__.rpartition(".")[0]
    with (
        patch(f"{where}.units.unit.redistribute_shards", recorded),
        patch(f"{where}.gradients.reduction.redistribute_shards", recorded),
    ):
        # the first learns the order of the units
        for step in range(2):
            seen.clear()
            loss_of(model, *own(mesh, *batch(step))).backward()
    assert [what for phase, what in seen if phase == "forward"] == ["gather", "gather", ""]
    assert [what for phase, what in seen if phase == "head"] == ["gather"]  # of the last block
    assert [what for phase, what in seen if phase == "backward"] == [
        "gather",
        "reduction,gather",
        "reduction",
    ]


@on_ranks(4)
def test_what_travels_to_replicas_is_under_way_while_other_units_compute() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))
    # larger ones are reduced in two rounds
    plain, model = Model(160, 3).double(), Model(160, 3).double()
    model.load_state_dict(plain.state_dict())
    shard_blocks_and_root(model, mesh)
    seen: list[int] = []
    under_way: list[ShardsInFlight] = []
    reach, wait = ShardsInFlight.reach_last_round, ShardsInFlight.wait

    def reached(flight: ShardsInFlight) -> bool:
        goes_on = reach(flight)
        under_way.extend([flight] * goes_on)
        return goes_on

    def waited(flight: ShardsInFlight, *args: Any) -> Any:
        under_way[:] = [other for other in under_way if other is not flight]
        return wait(flight, *args)

    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda *_: seen.append(len(under_way)))
    tokens, targets = batch(0)
    loss_of(plain, tokens, targets).backward()
    rank = torch.distributed.get_rank()
    with (
        patch.object(ShardsInFlight, "reach_last_round", reached),
        patch.object(ShardsInFlight, "wait", waited),
    ):
        loss_of(model, tokens.chunk(4)[rank], targets.chunk(4)[rank]).backward()
    assert seen == [0, 0, 1] and not under_way
    same_gradients(plain, model)
