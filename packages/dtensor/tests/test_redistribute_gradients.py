"""Covers: autograd.py (Redistribute): gradients of redistributions, twice, in chosen dtypes, from mesh to mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from shoal_dtensor.placements import Placement
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
WAYS: list[tuple[list[Placement], list[Placement]]] = [
    ([S0, S0], [R, R]),
    ([S0, R], [R, S0]),
    ([S1, S0], [S0, S1]),
    ([R, S1], [Shard(0, sizes=(4, 1)), R]),
]


def whole(tensor: Any) -> torch.Tensor:
    """The plain tensor, outside of autograd."""
    value: torch.Tensor = tensor.detach().full_tensor()
    return value


@pytest.mark.parametrize(("old", "new"), WAYS, ids=str)
@on_ranks(4)
def test_the_gradient_of_a_gradient_passes_through_a_redistribution(old: list[Any], new: list[Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    values = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 7 + 0.5
    plain = values.clone().requires_grad_()
    spread: Any = distribute_tensor(values, mesh, old).requires_grad_()
    (once,) = torch.autograd.grad((plain**3).sum(), plain, create_graph=True)
    (twice,) = torch.autograd.grad((once**2).sum(), plain)
    moved = spread.redistribute(placements=new)
    (first,) = torch.autograd.grad((moved**3).sum(), spread, create_graph=True)
    assert first.placements == spread.placements
    assert torch.allclose(whole(first), once)
    again: Any = first.redistribute(placements=new)
    (second,) = torch.autograd.grad((again**2).sum(), spread)
    assert second.placements == spread.placements
    assert torch.allclose(whole(second), twice)


@on_ranks(4)
def test_forward_and_backward_travel_in_the_dtypes_asked_for() -> None:
    from shoal_mesh import Event, observe, unobserve

    class Dtypes:
        def __init__(self) -> None:
            self.seen: list[torch.dtype] = []

        def before(self, event: Event) -> None:
            self.seen += [t.dtype for t in event.tensors]

        def after(self, event: Event) -> None:
            pass

    mesh = init_device_mesh("cpu", (4,))
    x: Any = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [S0]).requires_grad_()
    local = torch.ones(8, 2, requires_grad=True)
    summed: Any = DTensor.from_local(local, mesh, [Partial()])
    seen = Dtypes()
    observe(seen)
    try:
        y = x.redistribute(placements=[S1], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
        z = summed.redistribute(placements=[S0], forward_dtype=torch.float64, backward_dtype=torch.bfloat16)
        assert (y.dtype, z.dtype) == (torch.bfloat16, torch.float64)
        assert seen.seen == [torch.bfloat16, torch.float64]
        seen.seen.clear()
        torch.autograd.backward([y, z], [torch.ones_like(y), torch.ones_like(z)])
    finally:
        unobserve(seen)
    assert sorted(map(str, seen.seen)) == ["torch.bfloat16", "torch.float64"]
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    assert torch.equal(whole(x.grad), torch.ones(6, 2))
    assert local.grad is not None
    assert local.grad.dtype is torch.float32
    assert torch.equal(local.grad, torch.ones(8, 2))


MESHES: dict[str, Any] = {
    "other grid": lambda: (init_device_mesh("cpu", (4,)), [S0]),
    "fewer ranks": lambda: (DeviceMesh("cpu", [3, 1]), [S1]),
    "one rank": lambda: (DeviceMesh("cpu", [2]), [R]),
}


@pytest.mark.parametrize("name", MESHES)
@on_ranks(4)
def test_to_another_mesh_and_back_with_gradients(name: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    other, placements = MESHES[name]()
    values = torch.arange(15.0).view(5, 3)
    x: Any = distribute_tensor(values, mesh, [S0, S1]).requires_grad_()
    there = x.redistribute(other, placements)
    assert there.device_mesh == other
    back = there.redistribute(mesh, [R, S0])
    assert torch.equal(whole(back), values)
    (back * distribute_tensor(values, mesh, [R, S0])).sum().backward()
    assert x.grad is not None
    assert x.grad.placements == x.placements
    assert torch.equal(whole(x.grad), values)
