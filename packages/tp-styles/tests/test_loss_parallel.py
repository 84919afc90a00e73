"""Covers: losses/loss_parallel.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shoal_dtensor import DTensor
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import loss_parallel
from tp_checks import ALL_REDUCE, assert_same_gradient, sharded


@on_ranks(4)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_parallel(smoothing: float) -> None:
    full = torch.randn(6, 11, dtype=torch.double, requires_grad=True)
    target = torch.randint(11, (6,))
    expected: Any = functional.cross_entropy(full, target, label_smoothing=smoothing)
    expected.backward()
    x, _ = sharded(full, 1)
    with loss_parallel(), loss_parallel():
        with CommDebugMode() as mode:
            loss: Any = nn.CrossEntropyLoss(label_smoothing=smoothing)(x, target)
        assert mode.get_comm_counts()[ALL_REDUCE] == mode.get_total_counts() == 2
        assert isinstance(loss, DTensor)
        plain = functional.cross_entropy(full, target, label_smoothing=smoothing)
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(plain, expected)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert_same_gradient(x, 1, full)


@on_ranks(4)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_that_backward_computes_again(reentrant: bool) -> None:
    full = torch.randn(6, 11, dtype=torch.double, requires_grad=True)
    target = torch.randint(11, (6,))
    expected: Any = functional.cross_entropy(full, target)
    expected.backward()
    x, _ = sharded(full, 1)
    with loss_parallel():
        loss: Any = checkpoint(functional.cross_entropy, x, target, use_reentrant=reentrant)
        with CommDebugMode() as mode:
            loss.backward()
        assert mode.get_comm_counts()[ALL_REDUCE] == mode.get_total_counts() == 2
    assert_same_gradient(x, 1, full)


@on_ranks(4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_of_log_probabilities(reduction: str) -> None:
    full = torch.randn(6, 11, dtype=torch.double, requires_grad=True)
    target, weight = torch.randint(11, (6,)), torch.rand(11, dtype=torch.double)
    options: dict[str, Any] = {
        "weight": weight,
        "ignore_index": int(target[2]),
        "reduction": reduction,
    }
    expected: Any = functional.nll_loss(full, target, **options)
    expected.sum().backward()
    x, _ = sharded(full, 1)
    with loss_parallel():
        losses: list[Any] = [functional.nll_loss(x, target, **options)]
        losses.append(functional.nll_loss(input=x, target=target, **options))
    for loss in losses:
        assert isinstance(loss, DTensor)
        torch.testing.assert_close(loss.full_tensor(), expected)
    losses[0].sum().backward()
    assert_same_gradient(x, 1, full)
