"""Covers: dispatch.py: plain tensors that torch's own C++ made are replicated, those of a user an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_dtensor import DTensor, MixedTensorError, Shard, distribute_tensor
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
