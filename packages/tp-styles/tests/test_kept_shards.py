"""Shards that many passes read deliver to the parameters what autograd computed, in every way of asking for it.

Covers: lowering/parameters.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Shard, distribute_tensor
from shoal_mesh.testing import on_ranks
from shoal_tp_styles.lowering.parameters import delivered_shards, kept_shards
from shoal_tp_styles.testing import all_ranks

Read = Callable[[list[DTensor]], tuple[Tensor, ...]]
WAYS: dict[str, Read] = {"kept": kept_shards, "of one forward": delivered_shards}


def parameters() -> list[Any]:
    """Three of shape (5, 2), uneven on two ranks."""
    start = torch.arange(30, dtype=torch.double).view(3, 5, 2)
    return [nn.Parameter(distribute_tensor(each, all_ranks(), [Shard(0)])) for each in start]


def full(grads: list[Any]) -> list[Tensor | None]:
    return [None if grad is None else grad.full_tensor() for grad in grads]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_one_gradient_of_two_parameters_and_of_the_user(way: str) -> None:
    a, b, c = params = parameters()
    kept = WAYS[way](params)
    seed = torch.ones_like(kept[0])
    for passes in (1, 2, 3):
        one, two, three = kept if way == "kept" else WAYS[way](params)
        torch.autograd.backward(one + two, seed)
        torch.autograd.backward(three.square().sum())
        assert full([a.grad, b.grad]) == [pytest.approx(passes)] * 2
        torch.testing.assert_close(c.grad.full_tensor(), 2 * passes * c.detach().full_tensor())
        assert seed.eq(1).all(), "what the user gave is the user's"


@on_ranks(2)
def test_a_pass_that_is_limited_to_inputs() -> None:
    a, b, c = params = parameters()
    one, two, three = kept_shards(params)
    loss = (one * two).sum()
    torch.autograd.backward(loss, inputs=[b], retain_graph=True)
    assert [param.grad is None for param in params] == [True, False, True]
    torch.testing.assert_close(b.grad.full_tensor(), a.detach().full_tensor())
    grads: list[Any] = [*torch.autograd.grad(loss + three.sum(), [a, c], retain_graph=True)]
    torch.testing.assert_close(full(grads), [b.detach().full_tensor(), torch.ones(5, 2, dtype=torch.double)])
    assert a.grad is None
    assert c.grad is None


@on_ranks(2)
def test_hooks_layouts_and_dtypes_of_gradients() -> None:
    a, b, c = params = parameters()
    seen: list[Any] = []
    a.register_hook(lambda grad: grad * 3)
    b.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    c.grad_dtype = torch.float32
    kept = kept_shards(params)
    torch.autograd.backward([shard.sum() for shard in kept])
    assert full([a.grad, b.grad, *seen]) == [pytest.approx(want) for want in (3, 1, 1)]
    torch.autograd.backward(kept[1].sum())  # the hook of the first is not called for what there is not
    assert full([a.grad, b.grad]) == [pytest.approx(want) for want in (3, 2)]
    assert c.grad.dtype is torch.float32
    assert c.grad.full_tensor().eq(1).all()


@on_ranks(2)
def test_parameters_that_are_computed_get_theirs_through_autograd() -> None:
    (a, *_) = parameters()
    (shard,) = kept_shards([a * 2])
    torch.autograd.backward(shard.sum())
    assert a.grad.full_tensor().eq(2).all()
    assert kept_shards([]) == ()
