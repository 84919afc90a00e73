"""Covers: losses/functional.py."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional

from shoal_dtensor.errors import ArgumentValueError
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import Vocab, loss_parallel, losses
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
    tokens = target.clamp(min=0)
    ours: dict[str, Any] = {
        "nll": lambda x, _, vocab: losses.nll_loss(x, target, weight, vocab=vocab),
        "kl": lambda x, shard, vocab: losses.kl_div(x, shard.detach(), vocab=vocab),
        "log_prob": lambda x, _, vocab: losses.log_prob(x, tokens, vocab=vocab).square().sum(),
    }
    theirs: dict[str, Any] = {
        "nll": lambda x: functional.nll_loss(x, target, weight),
        "kl": lambda x: functional.kl_div(
            x.log_softmax(1), teacher.softmax(1), reduction="batchmean"
        ),
        "log_prob": lambda x: x.log_softmax(1).gather(1, tokens[:, None]).square().sum(),
    }
    # plain local logits were only given to cross_entropy and log_softmax
    for name, is_plain in product(ours, (False, True)):
        x, vocab = sharded(full, 1, is_plain)
        shard_of_teacher, _ = sharded(teacher, 1, is_plain)
        full.grad = None
        loss = ours[name](x, shard_of_teacher, vocab)
        expected = theirs[name](full)
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


LOSSES: dict[str, Any] = {
    "cross_entropy": losses.cross_entropy,
    "smoothed": lambda x, t: losses.cross_entropy(x, t, label_smoothing=0.1),
    "nll_loss": losses.nll_loss,
    "log_prob": lambda x, t: losses.log_prob(x, t.clamp(min=-1)),
    "loss_parallel": lambda x, t: _in_loss_parallel(functional.cross_entropy, x, t),
    "nll_loss in loss_parallel": lambda x, t: _in_loss_parallel(functional.nll_loss, x, t),
}


def _in_loss_parallel(loss: Any, x: Any, target: Any) -> Any:
    with loss_parallel():
        return loss(x, target)


@on_ranks(3)
@pytest.mark.parametrize("wrong", [11, -1, 1 << 20])
@pytest.mark.parametrize("name", LOSSES)
def test_a_target_that_is_no_class(name: str, wrong: int) -> None:
    # No rank found its logit, so its loss was the log-sum-exp.
    full, target = torch.randn(4, 11, dtype=torch.double), torch.tensor([0, 10, wrong, 3])
    with pytest.raises(
        IndexError, match=f"target {wrong} is out of bounds: targets must be 0 to 10"
    ):
        LOSSES[name](sharded(full, 1)[0], target)
    x, _ = sharded(torch.cat([full, full[:, :1]], 1), 1)
    padded = Vocab.of(x, 1, real=11)
    if wrong == 11:
        with pytest.raises(IndexError, match="target 11 is out of bounds: targets must be 0 to 10"):
            losses.cross_entropy(x, target, vocab=padded)
    if name != "log_prob":
        ignored = torch.tensor([0, 10, -100, 3])
        assert LOSSES[name](sharded(full, 1)[0], ignored).isfinite()


@on_ranks(2)
def test_a_target_that_is_no_class_in_compiled_code() -> None:
    full, target = torch.randn(4, 6), torch.tensor([0, 5, 6, 3])
    x, vocab = sharded(full, 1, plain=True)

    def loss_of(logits: Any, labels: Any) -> Any:
        return losses.cross_entropy(logits, labels, vocab=vocab)

    compiled: Any = torch.compile(loss_of, backend="aot_eager")
    loss: Any = compiled(x.detach(), target.clamp(max=5))
    torch.testing.assert_close(loss, functional.cross_entropy(full, target.clamp(max=5)))
    with pytest.raises(RuntimeError, match="a target is out of bounds: targets must be 0 to 5"):
        compiled(x.detach(), target)


@on_ranks(2)
def test_the_mean_of_half_types_stays_in_their_range() -> None:
    # Its sum, 16 * 20,000, was infinite in float16.
    log_probs, target = torch.full((16, 6), -20_000.0).half(), torch.arange(16) % 6
    loss: Any = losses.nll_loss(sharded(log_probs, 1)[0], target)
    assert loss.dtype == torch.float16 and loss.item() == 20_000.0


@on_ranks(2)
def test_a_reduction_that_there_is_not() -> None:
    x, vocab = sharded(torch.randn(6, 4), 1, True)
    unknown: Any = "average"
    with pytest.raises(ArgumentValueError, match="reduction must be"):
        losses.cross_entropy(x, torch.zeros(6, dtype=torch.long), vocab=vocab, reduction=unknown)
