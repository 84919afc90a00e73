"""Gradients of leaves, many in one collective, of one or several passes.

Covers: tensor/gradients.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from shoal_dtensor.tensor import gradients
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS: dict[tuple[int, ...], list[list[Placement]]] = {
    (4,): [[R], [S0], [R], [S1], [R]],
    (2, 2): [[R, R], [R, S0], [S0, S1], [R, R], [R, R]],
}


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 5, dtype=torch.float64, generator=generator) for _ in range(5)]


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 5, dtype=torch.float64, generator=generator) for _ in range(count)]


def leaves(
    mesh: DeviceMesh, layouts: Sequence[Sequence[Placement]] | None = None
) -> tuple[list[Any], list[Any]]:
    """Weights, plain and spread."""
    layouts = layouts or LAYOUTS[tuple(mesh.shape)]
    plain = [w.clone().requires_grad_() for w in weights()]
    spread = [
        distribute_tensor(w, mesh, p).requires_grad_()
        for w, p in zip(weights(), layouts, strict=True)
    ]
    return plain, spread


def data(mesh: DeviceMesh) -> list[Any]:
    return [distribute_tensor(x, mesh, [S0] + [R] * (mesh.ndim - 1)) for x in batches()]


def loss(x: Any, params: Sequence[Any]) -> Any:
    for w in params:
        x = (x @ w).tanh()
    return x.square().sum()


def check(plain: Sequence[Any], spread: Sequence[Any]) -> None:
    for one, many in zip(plain, spread, strict=True):
        assert type(many.grad) is DTensor and many.grad.placements == many.placements
        torch.testing.assert_close(many.grad.full_tensor(), one.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@on_ranks(4)
def test_accumulated_gradients_are_those_of_one_device(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    plain, spread = leaves(mesh)
    for i, (x, part) in enumerate(zip(batches(), data(mesh), strict=True)):
        loss(x, plain).backward()
        loss(part, spread).backward()
        check(plain, spread)
        if i == 1:
            for p in (*plain, *spread):
                p.grad.zero_()


@on_ranks(4)
def test_data_parallel_gradients_take_one_collective_a_backward() -> None:
    mesh = init_device_mesh("cpu", (4,))
    plain, spread = leaves(mesh, [[R]] * 5)
    for x, part in zip(batches(), data(mesh), strict=True):
        loss(x, plain).backward()
        with CommDebugMode() as counted:
            loss(part, spread).backward()
        assert counted.get_total_counts() == 1
        assert all(type(p.grad) is DTensor for p in spread)
    check(plain, spread)


@on_ranks(4)
def test_hooks_see_reduced_gradients_in_any_order() -> None:
    mesh = init_device_mesh("cpu", (4,))
    plain, spread = leaves(mesh, [[R]] * 5)
    seen: list[tuple[Placement, ...]] = []
    sums: list[Any] = []

    def doubled(grad: Any) -> Any:
        seen.append(grad.placements)
        return grad * 2

    def negate(p: Any) -> None:
        p.grad.neg_()

    for params in (plain, spread):
        params[1].register_hook(lambda g: g.mul_(3))
        params[3].register_hook(doubled if params is spread else lambda g: g * 2)
        params[2].register_post_accumulate_grad_hook(negate)
    spread[4].register_post_accumulate_grad_hook(
        lambda p: sums.append((p.grad.sum().item(), p.grad.placements))
    )
    for x, part in zip(batches(2), data(mesh), strict=False):
        loss(x, plain).backward()
        loss(part, spread).backward()
    check(plain, spread)
    assert seen == [(R,)] * 2 and sums[-1] == (pytest.approx(plain[4].grad.sum().item()), (R,))


@pytest.mark.parametrize("bucket", [0, 450])
@on_ranks(4)
def test_collectives_are_bounded(bucket: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    plain, spread = leaves(mesh, [[R]] * 5)
    usual, gradients.BUCKET = (
        gradients.BUCKET,
        bucket,
        # a gradient has 200 bytes, its all-reduce receives 300
    )
    try:
        x, part = batches()[0], data(mesh)[0]
        loss(x, plain).backward()
        with CommDebugMode() as counted:
            loss(part, spread).backward()
        assert counted.get_total_counts() == (3 if bucket else 5)
        check(plain, spread)
        loss(x, plain).backward()
        with CommDebugMode() as counted:
            loss(part, spread).backward()
        assert counted.get_total_counts() == (3 if bucket else 5)
        check(plain, spread)
    finally:
        gradients.BUCKET = usual


@on_ranks(4)
def test_gradients_of_gradients() -> None:
    mesh = init_device_mesh("cpu", (4,))
    plain, spread = leaves(mesh)
    for params, x in ((plain, batches()[0]), (spread, data(mesh)[0])):
        first = torch.autograd.grad(loss(x, params), params, create_graph=True)
        penalty: Any = sum(g.square().sum() for g in first)
        penalty.backward()
    check(plain, spread)
    for params, x in ((plain, batches()[1]), (spread, data(mesh)[1])):
        loss(x, params).backward(create_graph=True)
    for one, many in zip(plain, spread, strict=True):
        torch.testing.assert_close(many.grad.full_tensor(), one.grad, rtol=1e-12, atol=1e-12)


@on_ranks(4)
def test_a_module_with_gradients_can_be_converted() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Linear(5, 5, bias=False)
    model.weight = nn.Parameter(distribute_tensor(weights()[0].float(), mesh, [R]))
    (model(distribute_tensor(batches()[0].float(), mesh, [S0]))).sum().backward()
    model.double()
    assert model.weight.dtype == torch.float64 and model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float64
    model.zero_grad()
    model(data(mesh)[0]).sum().backward()
    expected = batches()[0].sum(0).expand(5, 5)
    whole: Any = model.weight.grad
    assert whole.placements == (R,)
    torch.testing.assert_close(whole.full_tensor(), expected)


@on_ranks(4)
def test_a_backward_pass_that_fails_does_not_disturb_the_next() -> None:
    mesh = init_device_mesh("cpu", (4,))
    plain, spread = leaves(mesh, [[R]] * 5)

    def fail(grad: Any) -> None:
        raise ValueError("on purpose")

    handle = spread[0].register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        loss(data(mesh)[0], spread).backward()
    handle.remove()
    for p in spread:
        p.grad = None
    loss(batches()[0], plain).backward()
    loss(data(mesh)[0], spread).backward()
    check(plain, spread)


@on_ranks(2)
def test_a_gradient_marked_as_conjugate_is_computed() -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(4.0).to(torch.complex128) + 1j
    x: Any = distribute_tensor(values, mesh, [Replicate()]).requires_grad_()
    (grad,) = torch.autograd.grad(x.to_local(), x, values.conj())
    assert not grad.to_local().is_conj()
    assert (
        grad.view(torch.float64).full_tensor().tolist()
        == values.conj().resolve_conj().view(torch.float64).tolist()
    )


@on_ranks(2)
def test_a_gradient_of_a_local_part_has_any_memory_order() -> None:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.randn(2, 12, 5, dtype=torch.float64)
    x: Any = distribute_tensor(full, mesh, [Shard(1)]).requires_grad_()
    local = x.view(2, 4, 3, 5).to_local()
    # as a transposition behind it gives
    seed = torch.randn(2, 5, 3, 2, dtype=torch.float64).transpose(1, 3)
    local.backward(seed)
    assert isinstance(x.grad, DTensor)
    torch.testing.assert_close(x.grad.to_local(), seed.reshape(2, 6, 5))


def test_hooks_of_a_parameter_that_a_conversion_has_exchanged() -> None:
    """`Module.to` leaves a DTensor parameter the object, and autograd another tensor's hooks."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        module: Any = nn.Linear(3, 4, bias=False)
        weight = distribute_tensor(module.weight.detach(), mesh, [Replicate()])
        module.weight = nn.Parameter(weight)
        x = distribute_tensor(torch.ones(2, 3, dtype=torch.float64), mesh, [Shard(0)])
        module.to(torch.float64)
        seen: list[Any] = []
        handle = module.weight.register_hook(lambda gradient: seen.append(gradient))
        module(x).sum().backward()
        # the leaf's placements and dtype, before the hook of the program
        assert [gradient.placements for gradient in seen] == [(Replicate(),)]
        assert seen[0].dtype == torch.float64
        handle.remove()
        module(x).sum().backward()
        assert len(seen) == 1
        assert module.weight.grad.placements == (Replicate(),)
