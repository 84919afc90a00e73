"""Covers: parameters/declared_layouts.py: parameters of hand-written code, by their SPMD types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from data_parallel_model import full
from shoal_data_parallel import DataParallelMeshDims, fully_shard
from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import I, P, R, ShardType as S, V, spmd
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.differentiable import all_reduce_replicated
from shoal_mesh.testing import fake_world, on_ranks

WIDTH, HIDDEN = 6, 8
NAMES = ("up", "down", "scale", "shift")
FLAT = DataParallelMeshDims(shard="data")
HYBRID = DataParallelMeshDims(shard="data", replicate="copies")


class MegatronBlock(nn.Module):
    """A Megatron block of plain tensors; with an axis, `up` and `down` are shards over it.

    Every rank scales its own hidden features, so gradients of `scale` are addends of a sum (R).
    `shift` is added behind the sum, where every rank has the whole gradient (I).
    """

    def __init__(self, axis: Any = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        values = {
            "up": torch.randn(HIDDEN, WIDTH, generator=generator, dtype=torch.float64),
            "down": torch.randn(WIDTH, HIDDEN, generator=generator, dtype=torch.float64),
            "scale": torch.randn(1, generator=generator, dtype=torch.float64),
            "shift": torch.randn(WIDTH, generator=generator, dtype=torch.float64),
        }
        self.axis = axis
        if axis is not None:
            mesh, name = axis
            ranks = mesh[name].size()
            coordinate = mesh[name].get_local_rank()
            values["up"] = values["up"].chunk(ranks, 0)[coordinate].clone()
            values["down"] = values["down"].chunk(ranks, 1)[coordinate].clone()
        for key, value in values.items():
            setattr(self, key, nn.Parameter(value))
        self.seen: list[Any] = []

    up: Any
    down: Any
    scale: Any
    shift: Any

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.up
        self.seen = [type(weight), *(spmd.type_of(getattr(self, name)) for name in NAMES)]
        hidden = torch.tanh(F.linear(x, weight)) * self.scale
        out = F.linear(hidden, self.down)
        if self.axis is not None:
            out = all_reduce_replicated(out, self.axis)
        shifted: Tensor = out + self.shift
        return shifted


def assert_types(block: MegatronBlock, mesh: DeviceMesh, **data: Any) -> None:
    types: dict[str, Any] = {"up": S(0), "down": S(1), "scale": R, "shift": I}
    with spmd.set_current_mesh(mesh):
        for name, kind in types.items():
            by_axis: dict[Any, Any] = {"tensor": kind, **data}
            spmd.assert_tensor_type(getattr(block, name), by_axis)


@pytest.mark.parametrize(
    ("shape", "names", "dims"),
    [
        ((2, 2), ("data", "tensor"), FLAT),
        ((1, 4), ("data", "tensor"), FLAT),
        ((4, 1), ("data", "tensor"), FLAT),
        ((2, 1, 2), ("copies", "data", "tensor"), HYBRID),
    ],
)
@pytest.mark.parametrize("names_data", [False, True])
@on_ranks(4, timeout=120)
def test_gradients_are_those_of_one_device(
    shape: tuple[int, ...], names: tuple[str, ...], dims: Any, names_data: bool
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    plain, model = MegatronBlock(), MegatronBlock((mesh, "tensor"))
    assert_types(model, mesh, **({"data": R} if names_data else {}))
    fully_shard(model, mesh, dp_mesh_dims=dims)
    up = model.up
    assert isinstance(up, DTensor) and up.shape == (HIDDEN, WIDTH)
    torch.testing.assert_close(full(up), plain.up)
    shards = shape[-1] * shape[-2]
    assert up.to_local().numel() <= -(-HIDDEN // shards) * WIDTH

    parts = mesh.size() // mesh["tensor"].size()
    mine = dist.get_rank() // mesh["tensor"].size()
    optimizers = [torch.optim.AdamW(one.parameters(), 0.1) for one in (plain, model)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
        plain(rows).square().mean().backward()
        loss = model(rows.chunk(parts)[mine]).square().mean()
        loss.backward()
        assert model.seen[0] is not DTensor
        for name in NAMES:
            expected = getattr(plain, name).grad
            torch.testing.assert_close(full(getattr(model, name).grad), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name in NAMES:
        torch.testing.assert_close(full(getattr(model, name)), getattr(plain, name))


@on_ranks(4)
def test_modules_hold_their_own_shards_again_when_styles_come_later() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = MegatronBlock((mesh, "tensor"))
    assert_types(model, mesh)
    before = model.up.detach().clone()
    fully_shard(model, mesh, dp_mesh_dims=FLAT)
    with torch.no_grad():
        unit: Any = model
        unit.unshard()
        found: Any = model.up
        assert not isinstance(found, DTensor)
        torch.testing.assert_close(found.detach(), before)
        unit.reshard()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(8):
        yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "data", "tensor"))


@pytest.mark.parametrize("is_new", [False, True])
def test_gathered_parameters_have_their_types(is_new: bool, mesh: DeviceMesh) -> None:
    """One axis of the current mesh may join the ranks of several data axes."""
    model = MegatronBlock((mesh, "tensor"))
    folded = DeviceMesh.concatenate([mesh["copies", "data"].flatten("all_data"), mesh["tensor"]])
    assert_types(model, folded, all_data=R)
    fully_shard(model, mesh, dp_mesh_dims=HYBRID)
    model.axis = None
    if is_new:
        model = model.to_empty(device="cpu")
    with spmd.set_current_mesh(folded, local_axes=["all_data"]), spmd.typecheck(local=True):
        x = torch.randn(2, WIDTH, dtype=torch.float64)
        spmd.assert_tensor_type(x, {"all_data": V, "tensor": R})
        with torch.no_grad():
            model(x)
        expected = ["S(0)", "S(1)", "R", "I"]
        for found, kind in zip(model.seen[1:], expected, strict=True):
            axes = {repr(axis): repr(axis_type) for axis, axis_type in found.by_axis.items()}
            assert axes == {"all_data": "R", "tensor": kind}


@pytest.mark.parametrize(
    ("types", "text"),
    [
        ({"data": R}, "has no type over 'tensor'"),
        ({"tensor": P}, "has the type P over 'tensor'"),
        ({"tensor": V}, "has the type V over 'tensor'"),
        ({"tensor": R, "data": I}, "the type I over the data axis data; it must be R"),
        ({"tensor": R, "data": S(0)}, r"the type S\(0\) over the data axis data; it must be R"),
    ],
)
def test_types_without_a_layout_are_refused(
    types: dict[Any, Any], text: str, mesh: DeviceMesh
) -> None:
    layer = nn.Linear(4, 4, bias=False)
    with spmd.set_current_mesh(mesh):
        spmd.assert_tensor_type(layer.weight, types)
    with pytest.raises(LayoutError, match=text):
        fully_shard(layer, mesh, dp_mesh_dims=HYBRID)


@on_ranks(4)
def test_gradients_of_a_dim_that_two_axes_shard_in_another_order() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "inner", "outer"))
    layer = nn.Linear(3, 2, bias=False)
    with spmd.set_current_mesh(mesh):
        spmd.assert_tensor_type(layer.weight, {}, (("outer", "inner"), None))
    fully_shard(layer, mesh, dp_mesh_dims=FLAT)
    weight: Any = layer.weight
    assert weight.shape == (8, 3)
    assert weight.spec.shard_order == ((0, (2, 1, 0)),)
    position = 2 * mesh["outer"].get_local_rank() + mesh["inner"].get_local_rank()
    (layer(torch.ones(1, 3)) * (position + 1)).sum().backward()
    assert full(weight.grad)[:, 0].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
