"""Covers: losses/functional.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from shoal_mesh import CommDebugMode
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import losses
from tp_checks import ALL_REDUCE, assert_same_gradient, naming, sharded

SHAPES = [((6, 11), 1), ((2, 9, 3), 1), ((5,), 0), ((4, 3), 1), ((3, 8, 2, 2), 1)]


@on_ranks(4)
@pytest.mark.parametrize("shape", [shape for shape, _ in SHAPES])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    ("smoothing", "weighted"), [(0.0, False), (0.1, False), (0.0, True), (0.2, True)]
)
def test_cross_entropy(
    shape: tuple[int, ...], reduction: Any, smoothing: float, weighted: bool
) -> None:
    dim = 0 if len(shape) == 1 else 1
    classes = shape[dim]
    for plain in (False, True):
        full = torch.randn(shape, dtype=torch.double, requires_grad=True)
        target = torch.randint(classes, shape[:dim] + shape[dim + 1 :])
        if target.ndim:
            target.view(-1)[0] = -100
        weight = torch.rand(classes, dtype=torch.double) if weighted else None
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        expected: Any = functional.cross_entropy(full, target, weight, **options)
        x, vocab = sharded(full, dim, plain)
        with CommDebugMode() as mode:
            loss: Any = losses.cross_entropy(x, target, weight, vocab=vocab, **options)
        assert mode.get_comm_counts()[ALL_REDUCE] == mode.get_total_counts() == 2
        torch.testing.assert_close(loss, expected)
        seed = torch.randn_like(expected)
        expected.backward(seed)
        with CommDebugMode() as mode:
            loss.backward(seed)
        assert mode.get_total_counts() == 0
        assert_same_gradient(x, dim, full)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(6, 11), (2, 9, 3), (5,)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_targets(shape: tuple[int, ...], reduction: Any, smoothing: float) -> None:
    dim = 0 if len(shape) == 1 else 1
    full = torch.randn(shape, dtype=torch.double, requires_grad=True)
    target = torch.randn(shape, dtype=torch.double).softmax(dim)
    weight = torch.rand(shape[dim], dtype=torch.double)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    expected: Any = functional.cross_entropy(full, target, weight, **options)
    for given in (target, sharded(target, dim)[0].detach()):
        x, _ = sharded(full, dim)
        loss: Any = losses.cross_entropy(x, given, weight, **options)
        torch.testing.assert_close(loss, expected)
        full.grad = None
        expected.sum().backward(retain_graph=True)
        loss.sum().backward()
        assert_same_gradient(x, dim, full)


@on_ranks(4)
@pytest.mark.parametrize("classes", [11, 8, 3])
def test_nll_kl_and_log_probabilities(classes: int) -> None:
    full = torch.randn(5, classes, dtype=torch.double, requires_grad=True)
    teacher = torch.randn(5, classes, dtype=torch.double)
    target = torch.randint(classes, (5,))
    weight = torch.rand(classes, dtype=torch.double)
    target[1] = -100
    ours: dict[str, Any] = {
        "nll": lambda x: losses.nll_loss(x, target, weight),
        "kl": lambda x: losses.kl_div(x, sharded(teacher, 1)[0].detach()),
        "log_prob": lambda x: losses.log_prob(x, target.clamp(min=0)).square().sum(),
    }
    theirs: dict[str, Any] = {
        "nll": lambda x: functional.nll_loss(x, target, weight),
        "kl": lambda x: functional.kl_div(
            x.log_softmax(1), teacher.softmax(1), reduction="batchmean"
        ),
        "log_prob": lambda x: (
            x.log_softmax(1).gather(1, target.clamp(min=0)[:, None]).square().sum()
        ),
    }
    for name, run in ours.items():
        x, _ = sharded(full, 1)
        full.grad = None
        loss, expected = run(x), theirs[name](full)
        torch.testing.assert_close(loss, expected, msg=naming(name))
        loss.backward()
        expected.backward()
        assert_same_gradient(x, 1, full)
    x, vocab = sharded(full, 1, plain=True)
    full.grad = None
    seed = torch.randn_like(full)
    out: Any = losses.log_softmax(x, vocab=vocab)
    torch.testing.assert_close(out, sharded(full.log_softmax(1), 1, plain=True)[0].detach())
    out.backward(sharded(seed, 1, plain=True)[0].detach())
    plain: Any = full.log_softmax(1)
    plain.backward(seed)
    assert_same_gradient(x, 1, full)


@on_ranks(4)
def test_half_precision_and_rows_without_mass() -> None:
    full = torch.randn(4, 9).bfloat16()
    x, _ = sharded(full, 1)
    target = torch.randint(9, (4,))
    loss: Any = losses.cross_entropy(x, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, functional.cross_entropy(full.float(), target))
    masked = torch.randn(3, 9)
    masked[:, 4:] = -torch.inf
    x, _ = sharded(masked, 1)
    torch.testing.assert_close(
        losses.log_prob(x, torch.zeros(3, dtype=torch.long)), masked.log_softmax(1)[:, 0]
    )
