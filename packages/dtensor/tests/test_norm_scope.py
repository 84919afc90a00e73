"""Norms of gradients of a model whose parameters are on several ranks.

Covers: optim/norm_scope.py.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor import clip_grad_norm_
from shoal_dtensor.errors import ArgumentValueError, MixedTensorError
from shoal_dtensor.internal import register_norm_scope
from shoal_mesh import Comm, CommDebugMode, comm_over
from shoal_mesh.testing import counts, on_ranks


class Part:
    """The parameters of this rank; the first rank counts all others, which are on both ranks."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._ids = {id(parameter) for parameter in parameters}

    def comm(self) -> Comm:
        return comm_over((0, 1))

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        return any(id(parameter) in self._ids for parameter in parameters)

    def counts(self, parameter: Tensor) -> bool:
        return id(parameter) in self._ids or dist.get_rank() == 0


def weights_with_gradients() -> list[nn.Parameter]:
    """Three weights of one process, with random gradients."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (3, 4, 5)]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return weights


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
@on_ranks(2)
def test_the_norm_is_that_of_all_ranks(order: float) -> None:
    first, second, shared = weights_with_gradients()
    own = (first, second)[dist.get_rank()]
    part = Part([own])
    register_norm_scope(part)
    whole = weights_with_gradients()
    expected = nn.utils.clip_grad_norm_(whole, 0.1, order)
    with CommDebugMode() as counted:
        norm = clip_grad_norm_([own, shared], 0.1, order)
    torch.testing.assert_close(norm, expected)
    assert counts(counted) == {"all_reduce": 1}
    torch.testing.assert_close(own.grad, whole[dist.get_rank()].grad)
    torch.testing.assert_close(shared.grad, whole[2].grad)


@on_ranks(2)
def test_a_rank_without_gradients_and_a_norm_that_is_not_finite() -> None:
    first, second, _ = weights_with_gradients()
    own = (first, second)[dist.get_rank()]
    part = Part([own])
    register_norm_scope(part)
    if own is first:
        own.grad = None
    assert second.grad is not None
    torch.testing.assert_close(clip_grad_norm_([own], 9.0), second.grad.norm())
    if own is second:
        second.grad.fill_(torch.inf)
    # on the other rank too, whose gradients are finite
    first.grad = torch.ones_like(first)
    with pytest.raises(RuntimeError, match=r"the norm of order 2\.0 of the gradients is inf"):
        clip_grad_norm_([own], 1.0, error_if_nonfinite=True)


@on_ranks(2)
def test_parameters_of_two_models_are_refused_and_a_scope_ends_with_its_model() -> None:
    first, second, other = weights_with_gradients()
    parts = [Part([first]), Part([second])]
    for part in parts:
        register_norm_scope(part)
    with pytest.raises(MixedTensorError, match="of 2 models"):
        clip_grad_norm_([first, second], 1.0)
    del parts, part
    gc.collect()
    with CommDebugMode() as counted:
        clip_grad_norm_([first, second, other], 1.0)
    assert counts(counted) == {}


@pytest.mark.parametrize("order", [0, -1.0, float("nan")])
def test_orders_that_are_no_norms_are_refused(order: float) -> None:
    weights = weights_with_gradients()
    with pytest.raises(ArgumentValueError, match="norm_type must be positive"):
        clip_grad_norm_(weights, 0.1, order)
