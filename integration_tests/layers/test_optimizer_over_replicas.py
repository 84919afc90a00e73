"""`fully_shard(shard_optimizer=True)` of modules with styles, against one process.

The tests run on real gloo ranks.

Covers: shoal_data_parallel/units/shared_shards.py, with shoal_tp_styles/plan/parallelize.py.
"""

# mypy: allow-untyped-calls
# Torch gives `backward` no types.

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from integration_tests.layers.styled_model import styled
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as api

from data_parallel_model import Model, batch, in_rows, loss_of, train_alike, two_equal_models
from shoal_data_parallel import fully_shard
from shoal_dtensor import full_tensor, get_state_dict, set_state_dict
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import HeadParallel, PackedColwiseParallel, parallelize_module

AXES = ("replica", "shard", "tensor")


def shard_units(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    """Shard blocks and model over the data axes."""
    axes = mesh["replica", "shard"]
    for block in model.blocks:
        fully_shard(block, axes, shard_optimizer=True, **options)
    return fully_shard(model, axes, shard_optimizer=True, **options)


def rows_of(mesh: DeviceMesh, *tensors: Tensor) -> list[Tensor]:
    """Return this rank's rows of a global batch; ranks of a tensor axis have the same rows."""
    parts = mesh.size(0) * mesh.size(1)
    part = mesh.get_local_rank("replica") * mesh.size(1) + mesh.get_local_rank("shard")
    return [tensor.chunk(parts)[part] for tensor in tensors]


def check_training(plain: Any, model: Any, mesh: DeviceMesh) -> None:
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    train_alike(plain, model, in_rows(mesh, tensor=mesh.size(2)), optimizers)


@on_ranks(8, timeout=200)
def test_three_axes_train_as_one_process() -> None:
    """10 and 30 rows over 2 x 2 x 2 ranks leave uneven and empty leaves."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=AXES)
    plain, model = two_equal_models()
    shard_units(styled(model, mesh), mesh)
    weight = model.blocks[0].up.weight
    # 30 rows: 15 of a tensor rank, 8 or 7 of a shard, 4 or 3 of a replica
    assert weight.to_local().shape[0] in (3, 4)
    check_training(plain, model, mesh)


@pytest.mark.parametrize("order", ["styles first", "styles last"])
@on_ranks(4, timeout=120)
def test_styles_before_and_after(order: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=AXES)
    plain, model = two_equal_models()
    if order == "styles first":
        shard_units(styled(model, mesh), mesh)
    else:
        styled(shard_units(model, mesh), mesh)
    check_training(plain, model, mesh)
    with CommDebugMode() as counted:
        model(rows_of(mesh, batch(0)[0])[0])
    updates = [record for record in counted.trace if record.axes == ("replica",)]
    assert len(updates) == 4


class PackedAttentionAndGate(nn.Module):
    """Attention of a packed weight, and a packed gate."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.gate = nn.Linear(8, 22)

    def forward(self, x: Tensor) -> Any:
        return self.gate(self.attention(x, x, x)[0])


@on_ranks(4, timeout=120)
def test_fused_parameters_are_divided_run_by_run(tmp_path: Path) -> None:
    paths = [str(tmp_path)]
    dist.broadcast_object_list(paths)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=AXES)
    plan = {
        "attention": HeadParallel(),
        "gate": PackedColwiseParallel(blocks={"gate": 11, "up": 11}),
    }
    torch.manual_seed(0)
    plain: Any = PackedAttentionAndGate().double()
    x = torch.randn(4, 5, 8, dtype=torch.float64)

    def build() -> Any:
        model = parallelize_module(copy.deepcopy(plain), mesh["tensor"], plan)
        fully_shard(model, mesh["replica", "shard"], shard_optimizer=True)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def backward(one: Any, rows: Tensor) -> None:
        # a rank of the tensor axis has the outputs of its columns only
        one(rows).square().sum().div(len(rows)).backward()

    model, optimizer = build()
    alone = torch.optim.AdamW(plain.parameters(), lr=0.1)
    before = copy.deepcopy(plain.state_dict())
    for _ in range(2):
        for one, rows in ((plain, x), (model, rows_of(mesh, x)[0])):
            backward(one, rows)
        for each in (alone, optimizer):
            each.step()
            each.zero_grad()
    state = dict(zip(("model", "optimizer"), api.get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=paths[0])
    # resumed by one process, whose next step is the next step of the ranks
    single: Any = PackedAttentionAndGate().double()
    single.load_state_dict(before)
    resumed = torch.optim.AdamW(single.parameters(), lr=0.1)
    target: Any = dict(
        zip(("model", "optimizer"), api.get_state_dict(single, resumed), strict=True)
    )
    dcp.load(target, checkpoint_id=paths[0], no_dist=True)
    api.set_state_dict(
        single, resumed, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
    )
    for one in (plain, single):
        backward(one, x)
    for each in (alone, resumed):
        each.step()
    for value, expected in zip(single.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, expected)


@on_ranks(4, timeout=120)
def test_state_dicts_resume_on_other_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=AXES)
    other_mesh = init_device_mesh("cpu", (1, 4, 1), mesh_dim_names=AXES)
    model: Any = shard_units(styled(two_equal_models()[0], mesh), mesh)
    other: Any = shard_units(Model().double(), other_mesh)
    optimizer, others = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, other))
    loss_of(model, *rows_of(mesh, *batch(0))).backward()
    optimizer.step()
    whole = api.StateDictOptions(full_state_dict=True)
    # optimizers load without copying, so that both would count the steps of both
    values, moments = copy.deepcopy(get_state_dict(model, optimizer, options=whole))
    set_state_dict(other, others, model_state_dict=values, optim_state_dict=moments, options=whole)
    for one, its_mesh, its_optimizer in ((model, mesh, optimizer), (other, other_mesh, others)):
        its_optimizer.zero_grad()
        loss_of(one, *rows_of(its_mesh, *batch(1))).backward()
        its_optimizer.step()
    for value, expected in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(value), full_tensor(expected))
