"""Covers: rules/nn/loss.py: losses of no elements, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from settings_and_refusals import deterministic
from shoal_dtensor import Placement, Replicate, Shard, distribute_tensor
from shoal_dtensor.testing import on_threads, thread_meshes

ELEMENTWISE = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_losses_of_empty_tensors(name: str, shape: tuple[int, ...], placement: Placement) -> None:
    x, target, loss = torch.ones(shape), torch.ones(shape), getattr(F, name)

    def check(mesh: Any) -> None:
        for reduction in ("mean", "sum", "none"):
            spread, fixed = (distribute_tensor(t, mesh, [placement]) for t in (x, target))
            with torch.enable_grad():
                got = loss(spread.requires_grad_(), fixed, reduction=reduction)
                got.sum().backward()
            torch.testing.assert_close(
                got.full_tensor(), loss(x, target, reduction=reduction), equal_nan=True
            )
            assert spread.grad is not None and spread.grad.shape == x.shape

    meshes = thread_meshes((4,))
    on_threads([partial(check, mesh) for mesh in meshes], meshes)


@pytest.mark.parametrize("name", ["multi_margin_loss", "multilabel_margin_loss"])
def test_ranks_without_samples_add_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's kernels leave the sum of no samples as the memory was.

    Deterministic algorithms fill it with nan.
    """
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    x, labels = torch.arange(8.0).view(2, 4).sin(), torch.tensor([[3, 1, 0, 2], [0, 2, 1, 3]])
    target, loss = labels[:, 0] if name == "multi_margin_loss" else labels, getattr(F, name)
    expected = torch.func.grad_and_value(lambda x: loss(x, target))(x)

    def check(mesh: Any) -> None:
        spread, fixed = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, target))
        with torch.enable_grad():
            got: Any = loss(spread.requires_grad_(), fixed)
            got.backward()
        grad: Any = spread.grad
        torch.testing.assert_close((grad.full_tensor(), got.full_tensor()), expected)

    meshes = thread_meshes((4,))
    with deterministic():
        on_threads([partial(check, mesh) for mesh in meshes], meshes)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_likelihoods_of_no_samples(reduction: str, placement: Placement) -> None:
    x, target = torch.ones(0, 4), torch.zeros(0, dtype=torch.int64)
    expected = F.cross_entropy(x, target, reduction=reduction)

    def check(mesh: Any) -> None:
        spread = distribute_tensor(x, mesh, [placement])
        with torch.enable_grad():
            got: Any = F.cross_entropy(
                spread.requires_grad_(),
                distribute_tensor(target, mesh, [Replicate()]),
                reduction=reduction,
            )
            got.sum().backward()
        torch.testing.assert_close(got.full_tensor(), expected, equal_nan=True)
        assert spread.grad is not None and spread.grad.shape == x.shape

    meshes = thread_meshes((4,))
    on_threads([partial(check, mesh) for mesh in meshes], meshes)
