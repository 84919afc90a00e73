"""`fully_shard` of modules with styles against one device, on real gloo ranks.

Covers: shoal_data_parallel/{fully_shard,sharded_parameters,unit}.py, with
shoal_tp_styles/plan/parallelize.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from integration_tests.layers.styled_model import PLAN, models, styled
from torch import nn

from data_parallel_checks import (
    full_state_dicts_load,
    units_keep_gradients,
    units_load_on_other_degrees,
    units_load_their_state,
    units_outlive_a_fault,
    units_start_as_one_device,
)
from data_parallel_model import (
    Block,
    Model,
    adapted,
    backward_of_each,
    batch,
    full,
    loss_of,
    mesh_of,
    own,
    same_gradients,
    shard_blocks_and_root,
    train_alike,
)
from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import DTensor, Shard, StridedShard, distribute_tensor
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import counts, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    LoRA,
    RowwiseParallel,
    merge_adapters,
    parallelize_module,
)


def single_and_sharded(mesh: DeviceMesh, make: Callable[[], nn.Module] = Model) -> tuple[Any, Any]:
    """A model on one device, and the same sharded over "data" and "tensor"."""
    plain, model = models(mesh, make)
    return plain, shard_blocks_and_root(model, mesh["data"])


def build(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Model(6, 2).double()


@on_ranks(4)
def test_training_is_that_of_one_device() -> None:
    mesh = mesh_of(2, 2)
    plain, model = single_and_sharded(mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    train_alike(plain, model, mesh, optimizers)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(4)
def test_checkpointed_units(reentrant: bool) -> None:
    mesh = mesh_of(2, 2)
    plain, model = single_and_sharded(mesh, lambda: Model(recompute=reentrant))
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


@on_ranks(4)
def test_gradients_are_kept_until_a_pass_that_reduces_them() -> None:
    mesh = mesh_of(2, 2)
    units_keep_gradients(*single_and_sharded(mesh), mesh)


@on_ranks(4)
def test_one_gather_forward_one_backward_one_reduction() -> None:
    mesh = mesh_of(2, 2)
    _, model = single_and_sharded(mesh)
    with CommDebugMode() as forward:
        loss = loss_of(model, *own(mesh, *batch(0)))
    with CommDebugMode() as backward:
        loss.backward()
    # Four units; the outermost stays gathered. Three blocks reduce along "tensor", and one
    # parameter is a number.
    assert counts(forward) == {"all_gather": 4, "all_reduce": 3}
    assert counts(backward) == {"all_gather": 3, "reduce_scatter": 4, "all_reduce": 1 + 3}


@on_ranks(4)
def test_state_dicts_hold_shards_and_load_again() -> None:
    mesh = mesh_of(2, 2)
    units_load_their_state(*single_and_sharded(mesh), mesh)


@pytest.mark.parametrize("kind", ["fully_shard", "replicate", "ZeRO-1"])
@on_ranks(4, timeout=120)
def test_full_state_dicts_go_to_one_device_and_to_other_degrees(kind: str) -> None:
    full_state_dicts_load(kind, styled)


@on_ranks(4)
def test_checkpoints_are_loaded_on_other_degrees() -> None:
    mesh = mesh_of(2, 2)
    tensor = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))
    others = [
        shard_blocks_and_root(build(1), mesh_of(4, 1)["data"]),
        shard_blocks_and_root(build(1), replicated),
        build(1),
        styled(build(1), tensor),
    ]
    units_load_on_other_degrees(
        shard_blocks_and_root(styled(build(), mesh), mesh["data"]), mesh, others
    )


@on_ranks(4)
def test_initialization_on_the_meta_device_is_that_of_one_device() -> None:
    mesh = mesh_of(2, 2)
    plain = Model(6, 2)
    with torch.device("meta"):
        model = Model(6, 2)
    units_start_as_one_device(plain, shard_blocks_and_root(styled(model, mesh), mesh["data"]))


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


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(4)
def test_a_step_that_raises_leaves_parameters_and_gradients(where: str) -> None:
    mesh = mesh_of(2, 2)
    units_outlive_a_fault(*single_and_sharded(mesh), mesh, where)


@on_ranks(4)
def test_an_axis_of_styles_is_refused() -> None:
    mesh = mesh_of(4, 1)
    placed = parallelize_module(Block(4), mesh["data"], {"up": ColwiseParallel()})
    with pytest.raises(LayoutError, match="use an axis for data or for styles"):
        fully_shard(placed, mesh["data"])


# --- adapters -------------------------------------------------------------------------------------


ADAPTED = {
    "blocks.*.up.base": ColwiseParallel(),
    "blocks.*.up.b": ColwiseParallel(),
    "blocks.*.down.base": RowwiseParallel(),
    "blocks.*.down.a": RowwiseParallel(),
}


@pytest.mark.parametrize("shard", [shard_blocks_and_root, replicate])
@on_ranks(4)
def test_adapters_of_a_frozen_model_train_as_on_one_device(shard: Any) -> None:
    mesh = mesh_of(2, 2)
    plain, model = adapted(), adapted()
    parallelize_module(model, mesh["tensor"], ADAPTED)
    shard(model, mesh["data"])
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01)
        for m in (plain, model)
    ]
    assert len(optimizers[1].param_groups[0]["params"]) == 8
    train_alike(plain, model, mesh, optimizers)


@on_ranks(4)
def test_adapters_of_a_style_are_merged_after_they_were_sharded() -> None:
    mesh = mesh_of(2, 2)
    plain = adapted()
    torch.manual_seed(0)
    model: Any = Model(6, 2).double().requires_grad_(False)
    bases: dict[str, ColwiseParallel | RowwiseParallel] = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    plan = {f"blocks.*.{name}": LoRA(base=base, rank=3, alpha=6.0) for name, base in bases.items()}
    shard_blocks_and_root(parallelize_module(model, mesh["tensor"], plan), mesh["data"])
    pairs = [
        (getattr(b, n), getattr(p, n))
        for b, p in zip(model.blocks, plain.blocks, strict=True)
        for n in bases
    ]
    with torch.no_grad():
        for ours, other in pairs:
            ours.lora_B.add_(0.3)
            other.a.weight.copy_(full(ours.lora_A))
            other.b.weight.copy_(full(ours.lora_B))
            other.base.load_state_dict({"weight": full(ours.weight), "bias": full(ours.bias)})
    backward_of_each(plain, model, mesh)
    for ours, other in pairs:
        torch.testing.assert_close(full(ours.lora_A.grad), other.a.weight.grad)
        torch.testing.assert_close(full(ours.lora_B.grad), other.b.weight.grad)
    merge_adapters(model)
    torch.testing.assert_close(model(batch(1)[0]), plain(batch(1)[0]))
    for ours, other in pairs:
        torch.testing.assert_close(
            full(ours.weight), other.base.weight + 2 * other.b.weight @ other.a.weight
        )


@pytest.mark.parametrize("rows", [8, 5])
@on_ranks(4)
def test_placements_of_parameters_say_the_order_of_data_and_styles(rows: int) -> None:
    # once they were (Shard(0), Shard(0)), and whoever read them got other rows
    mesh = mesh_of(2, 2)
    model: Any = nn.Sequential(nn.Linear(3, rows))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    for param in model.parameters():
        weight, whole = param.detach(), param.detach().full_tensor()
        place = weight.device_mesh, weight.placements
        assert weight.placements == (StridedShard(0, split_factor=2), Shard(0))
        copies: list[Any] = [
            DTensor.from_local(weight.to_local(), *place, shape=weight.shape),
            DTensor.from_local(weight.to_local(), *place, run_check=True),
            distribute_tensor(whole, *place),
            distribute_tensor(whole, mesh).redistribute(*place),
            torch.zeros_like(weight).copy_(distribute_tensor(whole, *place)),
        ]
        for copied in copies:
            assert copied.spec is weight.spec
            assert torch.equal(copied.to_local(), weight.to_local())
            assert torch.equal(copied.full_tensor(), whole)
