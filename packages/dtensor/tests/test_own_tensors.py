"""Covers: origins.py, dispatch.py: plain tensors that torch's own C++ made are replicated, those of a user an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_dtensor import DTensor, MixedTensorError, Partial, RandomStateError, Shard, distribute_tensor
from shoal_dtensor.rng import forget_checks
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks

USERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "variable": lambda x, one: x + one,
    "temporary": lambda x, one: x + torch.ones(4),
    "method": lambda x, one: x.add(torch.ones(4)),
    "reflected": lambda x, one: torch.ones(4) + x,
    "keyword": lambda x, one: torch.add(x, other=torch.ones(4)),
    "in place": lambda x, one: x.add_(torch.ones(4)),
    "unpacked": lambda x, one: x.add(*(torch.ones(4),)),
    "mapped": lambda x, one: list(map(x.add, [torch.ones(4)])),
    "in a list": lambda x, one: torch.cat([x, torch.ones(4)]),
    "index": lambda x, one: x[torch.tensor([0, 1])],
    "weight, transposed inside": lambda x, one: F.linear(x, torch.ones(3, 4)),
    "expanded inside": lambda x, one: F.mse_loss(x, torch.ones(4)),
    "einsum": lambda x, one: torch.einsum("a,ab->b", x, torch.ones(4, 3)),
    "detached": lambda x, one: x + one.detach(),
    "mask of a composed function": lambda x, one: torch.masked.mean(x, 0, mask=one > 0),
    "weight that a composed function expands": lambda x, one: F.binary_cross_entropy(x, x, torch.ones(4)),
    "matrix of a composed function": lambda x, one: torch.svd_lowrank(x.view(2, 2), M=torch.ones(2, 2)),
    "samples of a composed function": lambda x, one: F.fractional_max_pool2d(
        x.view(1, 1, 2, 2), 1, output_size=1, _random_samples=torch.rand(1, 1, 2)
    ),
    "offsets that are no range": lambda x, one: F.embedding_bag(x.long(), x.view(4, 1), torch.tensor([0, 1, 3])),
}


@pytest.mark.parametrize("use", USERS.values(), ids=USERS.keys())
def test_a_users_plain_tensor_is_an_error(use: Callable[[Tensor, Tensor], object]) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
        x[[0, 1]]  # torch's own index of the same shape must not open the door
        with pytest.raises(MixedTensorError):
            use(x, torch.ones(4))


@on_ranks(4)
def test_torchs_own_tensors_are_replicated() -> None:
    mesh = init_device_mesh("cpu", (4,))
    values = torch.tensor([3.0, -1.0, 2.0, 5.0, 4.0])
    x = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    y = values.clone().requires_grad_()
    for use in (
        lambda t: t[[4, 0]],
        lambda t: torch.combinations(t, 2),
        lambda t: t.cummax(0)[0],
        lambda t: torch.quantile(t, 0.3),
        lambda t: t.cumprod(0),
        lambda t: torch.copysign(t, t.detach()),
        lambda t: torch.mvlgamma(t + 5, 2),
        lambda t: torch.select_scatter(t.view(1, 5), t, 0, 0),
    ):
        for one in (x, y):
            one.grad = None
            use(one).square().sum().backward()
        assert isinstance(x.grad, DTensor)
        assert y.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), y.grad)


COMPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "fractional_max_pool2d": lambda t: F.fractional_max_pool2d(t.view(1, 2, 6, 5), 2, output_size=3),
    "svd_lowrank": lambda t: torch.svd_lowrank(t, 2)[1],
    "pca_lowrank": lambda t: torch.pca_lowrank(t, 2)[1],
    "masked.var": lambda t: torch.masked.var(t, 1, mask=t > -9),
    "unravel_index": lambda t: t.sum() + torch.stack(torch.unravel_index(t.argsort(0), (4, 5))).sum(),
    "embedding_bag": lambda t: F.embedding_bag(t.detach().abs().long().clamp(0, 3), t),
}


@pytest.mark.parametrize("name", COMPOSED)
@on_ranks(4)
def test_what_torch_composes_in_python(name: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    values = torch.randn(12, 5, dtype=torch.float64)
    for placement in (Shard(0), Shard(1), Shard(0, sizes=(9, 0, 1, 2))):
        x = distribute_tensor(values, mesh, [placement], src_data_rank=None).requires_grad_()
        y = values.clone().requires_grad_()
        results = []
        for one in (x, y):
            torch.manual_seed(3)
            result = COMPOSED[name](one)
            result.square().nansum().backward()  # type: ignore[no-untyped-call]  # torch gives it no types
            results.append(result.full_tensor() if isinstance(result, DTensor) else result)
        torch.testing.assert_close(*results)
        assert isinstance(x.grad, DTensor)
        assert y.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), y.grad)


@on_ranks(4)
def test_ranks_out_of_step_do_not_draw_inside_composed_functions() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(8, 5), mesh, [Shard(0)], src_data_rank=None)
    torch.manual_seed(mesh.get_rank())
    forget_checks()
    with pytest.raises(RandomStateError):
        torch.svd_lowrank(x, 2)


@on_ranks(4)
def test_a_gradient_that_nobody_depends_on() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(5, 5), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    tau = distribute_tensor(torch.empty(0), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    plain = x.detach().full_tensor().requires_grad_()  # type: ignore[attr-defined]  # a DTensor
    torch.linalg.householder_product(x, tau).sum().backward()
    torch.linalg.householder_product(plain, torch.empty(0)).sum().backward()
    assert (x.grad is None) == (plain.grad is None)


@on_ranks(4)
def test_a_sparse_result_is_plain() -> None:
    mesh = init_device_mesh("cpu", (4,))
    values = torch.tensor([[0.0, 1], [2, 0], [0, 3]])
    for x in (
        distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None),
        DTensor.from_local(values / 4, mesh, [Partial()]),
    ):
        x.requires_grad_()
        sparse = x.to_sparse()
        assert not isinstance(sparse, DTensor)
        torch.testing.assert_close(sparse.to_dense(), values)
        sparse.to_dense().square().sum().backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        torch.testing.assert_close(x.grad.full_tensor(), 2 * values)  # type: ignore[union-attr]  # a DTensor
