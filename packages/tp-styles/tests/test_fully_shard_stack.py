"""`fully_shard` with the rest of a training stack: compiler, initialization, checkpoints, dtypes; on real gloo ranks.

Covers: data_parallel/sharded_parameters.py.
"""

from __future__ import annotations

import tempfile
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint

from data_parallel_model import PLAN, Model, backward_of_each, batch, full, loss_of, mesh_of, own, same_gradients
from shoal_dtensor import DTensor, redistribute_shards
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import LayoutError, StyleError, fully_shard, parallelize_module, replicate
from shoal_tp_styles.data_parallel.unit import Unit
from shoal_tp_styles.data_parallel.unit_forward import state_of


def build(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Model(6, 2).double()


def sharded(model: Any, mesh: DeviceMesh) -> Any:
    """Blocks and model as units over "data", with styles along "tensor" where the mesh has that axis."""
    if "tensor" in mesh.axis_names and mesh["tensor"].size() > 1:
        parallelize_module(model, mesh["tensor"], PLAN)
    data = mesh["data"] if "tensor" in mesh.axis_names else mesh
    for block in model.blocks:
        fully_shard(block, data)
    return fully_shard(model, data)


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


@pytest.mark.parametrize(("data", "tensor"), [(4, 1), (2, 2)])
@on_ranks(4)
def test_initialization_on_the_meta_device_is_that_of_one_device(data: int, tensor: int) -> None:
    plain = Model(6, 2)
    with torch.device("meta"):
        model: Any = Model(6, 2)
    sharded(model, mesh_of(data, tensor)).to_empty(device="cpu")
    for one in (plain, model):
        torch.manual_seed(3)
        for module in one.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]  # a Module's attribute may be anything
        nn.init.normal_(one.scale)
    for (name, expected), (_, got) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(full(got), expected), name


@on_ranks(4)
def test_checkpoints_are_loaded_on_other_degrees() -> None:
    model = sharded(build(), mesh_of(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, *own(mesh_of(2, 2), *batch(0))).backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders)
        checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folders[0])
        tensor = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
        replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))
        others = [sharded(build(1), mesh_of(4, 1)), sharded(build(1), replicated), build(1)]
        others.append(parallelize_module(build(1), tensor, PLAN))
        for other in others:
            loaded = torch.optim.AdamW(other.parameters(), lr=0.01)
            for param in other.parameters():
                param.grad = torch.zeros_like(param)
            loaded.step()  # makes the state
            state = {"model": other.state_dict(), "optimizer": loaded.state_dict()}
            checkpoint.load(state, checkpoint_id=folders[0])
            other.load_state_dict(state["model"])
            loaded.load_state_dict(state["optimizer"])
            for saved, got in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(full(got), full(saved))
                for key, value in optimizer.state[saved].items():
                    assert torch.equal(full(loaded.state[got][key]), full(value))
        dist.barrier()


@on_ranks(4)
def test_sharding_changes_no_bit_of_replication() -> None:
    mesh = mesh_of(4, 1)
    models = [sharded(build(), mesh), replicate(build(), mesh["data"])]
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
    plain, model = build().float(), sharded(build(), mesh)
    model(batch(0)[0])  # the outermost unit stays gathered
    model.float()
    tokens, targets = batch(0)
    assert model(tokens).dtype == torch.float32
    loss_of(plain, tokens, targets).backward()
    loss_of(model, *own(mesh, tokens, targets)).backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_hooks_that_parameters_have_before_they_are_sharded() -> None:
    mesh = mesh_of(2, 2)
    plain, model = build(), build()
    for one in (plain, model):
        one.head.weight.register_hook(lambda grad: grad * 3)
        one.head.weight.tag = "kept"
    parallelize_module(model, mesh["tensor"], PLAN)
    fully_shard(model, mesh["data"])
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)
    assert isinstance(model.head.weight, DTensor)
    assert model.head.weight.tag == "kept"  # type: ignore[attr-defined]  # set above
    other: Any = parallelize_module(build(), mesh["tensor"], PLAN)
    other.blocks[0].up.weight.register_hook(lambda grad: grad * 3)
    with pytest.raises(LayoutError, match="after fully_shard"):
        fully_shard(other, mesh["data"])


@on_ranks(4)
def test_modules_that_are_gathered_ahead_are_those_that_were_named() -> None:
    mesh = mesh_of(4, 1)
    model = sharded(Model(6, 3).double(), mesh)
    plain = sharded(Model(6, 3).double(), mesh)
    plain.load_state_dict(model.state_dict())
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    second.set_modules_to_forward_prefetch([])
    third.set_modules_to_backward_prefetch([second, first])
    with pytest.raises(StyleError, match="got Linear"):
        first.set_modules_to_backward_prefetch([nn.Linear(2, 2)])
    numbers = {state_of(block).unit: i for i, block in enumerate(model.blocks)}
    seen: list[str] = []
    begin = Unit.start

    def start(unit: Unit) -> None:
        before = unit._coming
        begin(unit)
        if unit._coming is not before and unit in numbers:
            seen.append(f"gather {numbers[unit]}")

    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: seen.append(f"forward {i}"))
        block.register_full_backward_pre_hook(lambda *_, i=i: seen.append(f"backward {i}"))
    for step in range(2):
        seen.clear()
        with patch.object(Unit, "start", start):
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
    model = sharded(Model(6, 3).double(), mesh)
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

        return Mock(wait=waited, poll=lambda: None)

    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(("forward", ",".join(under_way))))
        block.register_full_backward_pre_hook(lambda *_: seen.append(("backward", ",".join(under_way))))
    where = fully_shard.__module__.rpartition(".")[0]
    with (
        patch(f"{where}.unit.redistribute_shards", recorded),
        patch(f"{where}.reduction.redistribute_shards", recorded),
    ):
        for step in range(2):  # the first learns the order of the units
            seen.clear()
            loss_of(model, *own(mesh, *batch(step))).backward()
    assert [what for phase, what in seen if phase == "forward"] == ["gather", "gather", ""]
    assert [what for phase, what in seen if phase == "backward"] == ["gather", "reduction,gather", "reduction"]
