"""Modules of which parts are frozen, adapted, or on axes of their own, under `fully_shard`; on real gloo ranks.

Covers: data_parallel/unit.py, data_parallel/reduction.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from data_parallel_model import (
    PLAN,
    Model,
    backward_of_each,
    batch,
    full,
    loss_of,
    mesh_of,
    own,
    same_gradients,
    same_weights,
    train_alike,
)
from shoal_dtensor import Shard, distribute_tensor, get_state_dict, set_state_dict
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.differentiable import all_gather, reduce_scatter
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LoRA,
    RowwiseParallel,
    fully_shard,
    merge_adapters,
    parallelize_module,
    replicate,
)

# --- adapters ---------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen Linear and two small trained ones beside it, as libraries of adapters make of a Linear."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2 * self.b(self.a(x))
        return out


ADAPTED = {
    "blocks.*.up.base": ColwiseParallel(),
    "blocks.*.up.b": ColwiseParallel(),
    "blocks.*.down.base": RowwiseParallel(),
    "blocks.*.down.a": RowwiseParallel(),
}


def adapted() -> Any:
    torch.manual_seed(0)
    model: Any = Model(6, 2).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model.double()


def sharded(model: Any, data: DeviceMesh) -> Any:
    for block in model.blocks:
        fully_shard(block, data)
    return fully_shard(model, data)


@pytest.mark.parametrize("shard", [sharded, replicate])
@pytest.mark.parametrize(("data", "tensor"), [(4, 1), (2, 2)])
@on_ranks(4)
def test_adapters_of_a_frozen_model_train_as_on_one_device(shard: Any, data: int, tensor: int) -> None:
    mesh = mesh_of(data, tensor)
    plain, model = adapted(), adapted()
    if tensor > 1:
        parallelize_module(model, mesh["tensor"], ADAPTED)
    shard(model, mesh["data"])
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (plain, model)]
    assert len(optimizers[1].param_groups[0]["params"]) == 8
    train_alike(plain, model, mesh, optimizers)


@on_ranks(4)
def test_adapters_of_a_style_are_merged_after_they_were_sharded() -> None:
    mesh = mesh_of(2, 2)
    plain = adapted()
    torch.manual_seed(0)
    model: Any = Model(6, 2).double().requires_grad_(False)
    bases: dict[str, ColwiseParallel | RowwiseParallel] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    plan = {f"blocks.*.{name}": LoRA(base=base, rank=3, alpha=6.0) for name, base in bases.items()}
    sharded(parallelize_module(model, mesh["tensor"], plan), mesh["data"])
    pairs = [(getattr(b, n), getattr(p, n)) for b, p in zip(model.blocks, plain.blocks, strict=True) for n in bases]
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
        torch.testing.assert_close(full(ours.weight), other.base.weight + 2 * other.b.weight @ other.a.weight)


# --- experts ----------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Experts whose weights are one parameter; of each rank along an axis, those that it holds see all rows of it."""

    axis: tuple[DeviceMesh, int] | None = None

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, 6, 6))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        if self.axis is None:
            return _mixed(x, gates, self.weight)
        own: Any = self.weight
        rows, shares = all_gather(x, self.axis), all_gather(gates, self.axis)
        at = self.axis[0].get_local_rank()
        local = own.to_local()
        mine = shares[:, at * len(local) : (at + 1) * len(local)]
        return reduce_scatter(_mixed(rows, mine, local), self.axis)


def _mixed(x: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("re,eij,rj->ri", gates, weight, x)


class Mixture(nn.Module):
    """A router and its experts, between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.router, self.experts, self.down = nn.Linear(6, 6), nn.Linear(6, 4), Experts(4), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(x))
        out: Tensor = self.down(x + self.experts(x, self.router(x).softmax(-1)))
        return out


@pytest.mark.parametrize("dense", ["flat", "replicated over the first"])
@on_ranks(4)
def test_experts_on_an_axis_that_is_data_to_the_dense_layers(dense: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    torch.manual_seed(0)
    plain = Mixture().double()
    model: Any = copy.deepcopy(plain)
    experts = model.experts
    experts.axis = mesh["expert"], 0
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh["expert"], [Shard(0)]))
    # An expert sees the rows of all ranks of its axis, so its gradient is a sum over them already.
    fully_shard(experts, mesh["data"], shard_placement_fn=lambda param: Shard(1)).set_gradient_divide_factor(4)
    fully_shard(model, mesh.flatten() if dense == "flat" else mesh)
    assert model.experts.weight.placements == (Shard(1), Shard(0))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (plain, model)]
    for number in range(3):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        plain(x).square().mean().backward()
        model(x.chunk(4)[torch.distributed.get_rank()]).square().mean().backward()
        same_gradients(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_weights(plain, model)


@on_ranks(4)
def test_units_on_slices_and_orders_of_axes_of_their_own() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    model: Any = copy.deepcopy(plain)
    for module, data in zip(model, (mesh["a"], mesh["a"], mesh["b", "a"], mesh), strict=True):
        fully_shard(module, data)
    fully_shard(model, mesh["a"])
    x = torch.randn(8, 6, dtype=torch.float64)
    plain(x).square().mean().backward()
    model(x.chunk(2)[mesh.get_local_rank("a")]).square().mean().backward()  # the ranks of "b" have the same rows
    same_gradients(plain, model)
    assert all_reduce(torch.ones(()), (mesh, "a")).item() == 2


# --- full state dicts -------------------------------------------------------------------------------------------------

FULL = StateDictOptions(full_state_dict=True)


def built(kind: str, mesh: DeviceMesh | None, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = Model(6, 2).double()
    if mesh is not None:
        if mesh.shape[1] > 1:
            parallelize_module(model, mesh["tensor"], PLAN)
        if kind == "fully_shard":
            sharded(model, mesh["data"])
        else:
            replicate(model, mesh["data"], shard_optimizer=kind == "ZeRO-1")
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, number: int) -> None:
    rows = batch(number) if mesh is None else own(mesh, *batch(number))
    loss_of(model, *rows).backward()
    optimizer.step()
    optimizer.zero_grad()


def same(state: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            same(state[key], value)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(full(state), expected)


@pytest.mark.parametrize("kind", ["fully_shard", "replicate", "ZeRO-1"])
@on_ranks(4, timeout=120)
def test_full_state_dicts_go_to_one_device_and_to_other_degrees(kind: str) -> None:
    plain = built(kind, None, 0)
    step(*plain, None, 0)
    for shape in ((4, 1), (2, 2), (1, 4)):
        mesh = mesh_of(*shape)
        one, other, alone = built(kind, mesh, 0), built(kind, mesh_of(*shape[::-1]), 1), built(kind, None, 2)
        step(*one, mesh, 0)
        state = get_state_dict(*one, options=FULL)
        for got, expected in zip(state, get_state_dict(*plain), strict=True):
            same(got, expected)
        same(get_state_dict(*one)[0], state[0])  # of shards
        for target in (alone, other):
            values, moments = copy.deepcopy(state)  # an optimizer keeps what it loads
            set_state_dict(*target, model_state_dict=values, optim_state_dict=moments, options=FULL)
        step(*alone, None, 1)
        step(*other, mesh_of(*shape[::-1]), 1)
        for got, expected in zip(get_state_dict(*other, options=FULL), get_state_dict(*alone), strict=True):
            same(got, expected)
