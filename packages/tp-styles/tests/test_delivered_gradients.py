"""Parameters get the gradients that autograd computes for their local shards.

This holds for every way to request them.

Covers: lowering/parameters.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import Shard, distribute_tensor
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import local_parameters


def shards_of(params: list[Any]) -> list[Any]:
    return [*local_parameters(dict(zip("abc", params, strict=False))).values()]


def parameters() -> list[Any]:
    """Three of shape (5, 2), uneven on two ranks."""
    start = torch.arange(30, dtype=torch.double).view(3, 5, 2)
    return [nn.Parameter(distribute_tensor(each, all_ranks(), [Shard(0)])) for each in start]


def full(grads: list[Any]) -> list[Tensor | None]:
    return [None if grad is None else grad.full_tensor() for grad in grads]


@on_ranks(2)
def test_one_gradient_of_two_parameters_and_of_the_user() -> None:
    a, b, c = params = parameters()
    seed = torch.ones_like(a.to_local())
    for passes in (1, 2, 3):
        one, two, three = shards_of(params)
        torch.autograd.backward(one + two, seed)
        torch.autograd.backward(three.square().sum())
        assert full([a.grad, b.grad]) == [pytest.approx(passes)] * 2
        torch.testing.assert_close(c.grad.full_tensor(), 2 * passes * c.detach().full_tensor())
        assert seed.eq(1).all(), "what the user gave is the user's"


@on_ranks(2)
def test_a_pass_that_is_limited_to_inputs() -> None:
    a, b, c = params = parameters()
    one, two, three = shards_of(params)
    loss = (one * two).sum()
    torch.autograd.backward(loss, inputs=[b], retain_graph=True)
    assert [param.grad is None for param in params] == [True, False, True]
    torch.testing.assert_close(b.grad.full_tensor(), a.detach().full_tensor())
    grads: list[Any] = [*torch.autograd.grad(loss + three.sum(), [a, c], retain_graph=True)]
    torch.testing.assert_close(
        full(grads), [b.detach().full_tensor(), torch.ones(5, 2, dtype=torch.double)]
    )
    assert a.grad is None
    assert c.grad is None


@on_ranks(2)
def test_hooks_layouts_and_dtypes_of_gradients() -> None:
    a, b, c = params = parameters()
    seen: list[Any] = []
    a.register_hook(lambda grad: grad * 3)
    b.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    c.grad_dtype = torch.float32
    shards = shards_of(params)
    torch.autograd.backward([shard.sum() for shard in shards])
    assert full([a.grad, b.grad, *seen]) == [pytest.approx(want) for want in (3, 1, 1)]
    # the hook of the first is not called for what there is not
    torch.autograd.backward(shards[1].sum())
    assert full([a.grad, b.grad]) == [pytest.approx(want) for want in (3, 2)]
    assert c.grad.dtype is torch.float32
    assert c.grad.full_tensor().eq(1).all()


@on_ranks(2)
def test_parameters_that_are_computed_get_theirs_through_autograd() -> None:
    (a, *_) = parameters()
    (shard,) = shards_of([a * 2])
    torch.autograd.backward(shard.sum())
    assert a.grad.full_tensor().eq(2).all()
