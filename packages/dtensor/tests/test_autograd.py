"""Gradients of redistributions, twice, in dtypes, from mesh to mesh.

Covers: tensor/autograd.py (Redistribute).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard, coalesce, distribute_tensor
from shoal_dtensor.errors import NoRuleError
from shoal_mesh import DeviceMesh, LockstepError, init_device_mesh, lockstep, restart_world
from shoal_mesh.testing import fake_world, observed, on_ranks

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
def test_the_gradient_of_a_gradient_passes_through_a_redistribution(
    old: list[Any], new: list[Any]
) -> None:
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
    mesh = init_device_mesh("cpu", (4,))
    x: Any = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [S0]).requires_grad_()
    local = torch.ones(8, 2, requires_grad=True)
    summed: Any = DTensor.from_local(local, mesh, [Partial()])
    with observed() as forward:
        y = x.redistribute(
            placements=[S1], forward_dtype=torch.bfloat16, backward_dtype=torch.float64
        )
        z = summed.redistribute(
            placements=[S0], forward_dtype=torch.float64, backward_dtype=torch.bfloat16
        )
    assert (y.dtype, z.dtype) == (torch.bfloat16, torch.float64)
    assert [t.dtype for event in forward for t in event.tensors] == [torch.bfloat16, torch.float64]
    with observed() as backward:
        torch.autograd.backward([y, z], [torch.ones_like(y), torch.ones_like(z)])
    dtypes = [str(t.dtype) for event in backward for t in event.tensors]
    assert sorted(dtypes) == ["torch.bfloat16", "torch.float64"]
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


@on_ranks(4)
def test_lockstep_compares_what_a_redistribution_is_for() -> None:
    """Both reduce-scatters send 16 numbers; they give tensors of other layouts."""
    mesh = init_device_mesh("cpu", (4,))
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    with lockstep(timeout=10):
        partial.redistribute(placements=[S0])
        with pytest.raises(LockstepError, match=r"redistribute .* -> Spec"):
            partial.redistribute(placements=[S1 if mesh.get_rank() == 3 else S0])
    restart_world()


@on_ranks(4)
@pytest.mark.parametrize("count", [1, 2])
def test_lockstep_compares_what_travels_together(count: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    partials = [DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]) for _ in range(count)]
    with (
        lockstep(timeout=10),
        pytest.raises(LockstepError, match=r"redistribute .* -> Spec"),
        coalesce(),
    ):
        for partial in partials:
            partial.redistribute(placements=[S1 if mesh.get_rank() == 3 else S0])
    restart_world()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which linearize imports
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # the same, as torch 2.15 has it
def test_recording_real_values_is_refused() -> None:
    """`linearize` returned what its record had computed from uninitialised tangents."""
    with fake_world(2):
        x = distribute_tensor(
            torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        closed_over = x + 1
        # also where all decisions are remembered
        for decided in (False, True):
            with pytest.raises(NoRuleError, match=r"torch\.func\.linearize"):
                torch.func.linearize(torch.sin, x)
            with pytest.raises(NoRuleError, match="Pass local tensors to make_fx"):
                make_fx(lambda y: y * closed_over.sin())(x)
            graph = make_fx(lambda y, z: y * z.sin())(x, closed_over)
            assert torch.equal(whole(graph(x + 3, x)), whole((x + 3).mul(x.sin()))), decided
            x * closed_over.sin()


FORWARD_MODE: dict[str, Callable[[Any], Any]] = {
    "times a number": lambda x: x * 2.0 + x / 4.0,
    "plus a number": lambda x: 1.0 - (x + 1.0),
    "softmax": lambda x: x.softmax(0),
    "product": lambda x: x @ x,
    "views": lambda x: torch.cat([x.view(2, 8)[1:], x.t().reshape(2, 8)]),
    "norm": lambda x: x.norm() + x.mean(),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", FORWARD_MODE)
@on_ranks(2)
def test_forward_mode(name: str) -> None:
    function, mesh = FORWARD_MODE[name], init_device_mesh("cpu", (2,))
    x, t = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for placement in (Shard(0), Shard(1), Replicate()):
        sharded = [distribute_tensor(tensor, mesh, [placement]) for tensor in (x, t)]
        for value, expected in zip(
            torch.func.jvp(function, (sharded[0],), (sharded[1],)),
            torch.func.jvp(function, (x,), (t,)),
            strict=True,
        ):
            torch.testing.assert_close(whole(value), expected)
