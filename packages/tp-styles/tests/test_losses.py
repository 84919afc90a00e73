"""Losses on a cut vocabulary against the full logits, in float64.  Covers: losses.py, vocab.py, choose.py, loss.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import LayoutError, Vocab, choose, loss_parallel, losses
from shoal_tp_styles.testing import all_ranks, told

ALL_REDUCE = torch.ops._c10d_functional.all_reduce


def cut(full: Tensor, dim: int, plain: bool = False) -> tuple[Tensor, Any]:
    """Logits cut along `dim`, as DTensor or as plain local part with its Vocab."""
    mesh = all_ranks()
    sharded = distribute_tensor(full.detach(), mesh, (Shard(dim),), src_data_rank=None)
    if not plain:
        return sharded.requires_grad_(), None
    return sharded.to_local().clone().requires_grad_(), Vocab.even(mesh, full.shape[dim])


def gradient(x: Tensor, dim: int, full: Tensor) -> Tensor:
    """The full gradient's part that belongs to `x`, or all of it for a DTensor, and x's own."""
    assert x.grad is not None and full.grad is not None, "both have gradients"
    if isinstance(x, DTensor):
        assert isinstance(x.grad, DTensor), "as its leaf"
        torch.testing.assert_close(x.grad.full_tensor(), full.grad)
    else:
        torch.testing.assert_close(x.grad, cut(full.grad, dim, plain=True)[0].detach())
    return x


SHAPES = [((6, 11), 1), ((2, 9, 3), 1), ((5,), 0), ((4, 3), 1), ((3, 8, 2, 2), 1)]


@on_ranks(4)
@pytest.mark.parametrize("shape", [shape for shape, _ in SHAPES])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.1, False), (0.0, True), (0.2, True)])
def test_cross_entropy(shape: tuple[int, ...], reduction: Any, smoothing: float, weighted: bool) -> None:
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
        x, vocab = cut(full, dim, plain)
        with CommDebugMode() as mode:
            loss: Any = losses.cross_entropy(x, target, weight, vocab=vocab, **options)
        assert mode.get_comm_counts()[ALL_REDUCE] == mode.get_total_counts() == 2
        torch.testing.assert_close(loss, expected)
        seed = torch.randn_like(expected)
        expected.backward(seed)
        with CommDebugMode() as mode:
            loss.backward(seed)
        assert mode.get_total_counts() == 0
        gradient(x, dim, full)


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
    for given in (target, cut(target, dim)[0].detach()):
        x, _ = cut(full, dim)
        loss: Any = losses.cross_entropy(x, given, weight, **options)
        torch.testing.assert_close(loss, expected)
        full.grad = None
        expected.sum().backward(retain_graph=True)
        loss.sum().backward()
        gradient(x, dim, full)


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
        "kl": lambda x: losses.kl_div(x, cut(teacher, 1)[0].detach()),
        "log_prob": lambda x: losses.log_prob(x, target.clamp(min=0)).square().sum(),
    }
    theirs: dict[str, Any] = {
        "nll": lambda x: functional.nll_loss(x, target, weight),
        "kl": lambda x: functional.kl_div(x.log_softmax(1), teacher.softmax(1), reduction="batchmean"),
        "log_prob": lambda x: x.log_softmax(1).gather(1, target.clamp(min=0)[:, None]).square().sum(),
    }
    for name, run in ours.items():
        x, _ = cut(full, 1)
        full.grad = None
        loss, expected = run(x), theirs[name](full)
        torch.testing.assert_close(loss, expected, msg=told(name))
        loss.backward()
        expected.backward()
        gradient(x, 1, full)
    x, vocab = cut(full, 1, plain=True)
    full.grad = None
    seed = torch.randn_like(full)
    out: Any = losses.log_softmax(x, vocab=vocab)
    torch.testing.assert_close(out, cut(full.log_softmax(1), 1, plain=True)[0].detach())
    out.backward(cut(seed, 1, plain=True)[0].detach())
    whole: Any = full.log_softmax(1)
    whole.backward(seed)
    gradient(x, 1, full)


@on_ranks(4)
def test_choices_are_those_of_the_full_logits() -> None:
    full = torch.randn(7, 11, dtype=torch.double)
    full[0, 2] = full[0, 9] = 50.0  # equal maxima on two ranks: the smaller index
    full[1] = 1.0
    x, _ = cut(full, 1)
    assert choose.argmax(x).tolist() == full.argmax(1).tolist()
    mesh = all_ranks()
    drawn = {choose.sample(x, generator=torch.Generator().manual_seed(3)).tolist()[2] for _ in range(2)}
    assert len(drawn) == 1
    many = full[2].expand(4000, 11)
    tokens = choose.sample(cut(many, 1)[0], generator=torch.Generator().manual_seed(0))
    share = torch.bincount(tokens, minlength=11) / 4000
    torch.testing.assert_close(share.double(), full[2].softmax(0), atol=0.03, rtol=0)
    point = torch.rand(7, dtype=torch.double, generator=torch.Generator().manual_seed(5))
    ours = choose.sample(x, generator=torch.Generator().manual_seed(5))
    single: Any = torch.searchsorted(full.softmax(1).cumsum(1), point[:, None], right=True).squeeze(1)
    assert ours.tolist() == single.tolist()
    assert choose.sample(x, temperature=0).tolist() == full.argmax(1).tolist()
    padded = torch.cat([full, torch.full((7, 2), 99.0, dtype=torch.double)], 1)
    x, _ = cut(padded, 1)
    eleven = Vocab.of(x, 1, real=11)
    assert choose.argmax(x, vocab=eleven).tolist() == full.argmax(1).tolist()
    target = torch.randint(11, (7,))
    loss: Any = losses.cross_entropy(x, target, vocab=eleven, label_smoothing=0.1)
    torch.testing.assert_close(loss, functional.cross_entropy(full, target, label_smoothing=0.1))
    assert mesh.ndim == 1


@on_ranks(4)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_parallel(smoothing: float) -> None:
    full = torch.randn(6, 11, dtype=torch.double, requires_grad=True)
    target = torch.randint(11, (6,))
    expected: Any = functional.cross_entropy(full, target, label_smoothing=smoothing)
    expected.backward()
    x, _ = cut(full, 1)
    with loss_parallel(), loss_parallel():
        with CommDebugMode() as mode:
            loss: Any = nn.CrossEntropyLoss(label_smoothing=smoothing)(x, target)
        assert mode.get_comm_counts()[ALL_REDUCE] == mode.get_total_counts() == 2
        assert isinstance(loss, DTensor)
        plain = functional.cross_entropy(full, target, label_smoothing=smoothing)
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(plain, expected)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    gradient(x, 1, full)


@on_ranks(4)
def test_half_precision_and_rows_without_mass() -> None:
    full = torch.randn(4, 9).bfloat16()
    x, _ = cut(full, 1)
    target = torch.randint(9, (4,))
    loss: Any = losses.cross_entropy(x, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, functional.cross_entropy(full.float(), target))
    masked = torch.randn(3, 9)
    masked[:, 4:] = -torch.inf
    x, _ = cut(masked, 1)
    torch.testing.assert_close(losses.log_prob(x, torch.zeros(3, dtype=torch.long)), masked.log_softmax(1)[:, 0])


@on_ranks(2)
def test_logits_that_are_not_cut_are_refused() -> None:
    with pytest.raises(LayoutError, match="vocab=Vocab"):
        losses.cross_entropy(torch.randn(2, 3), torch.zeros(2, dtype=torch.long))
    x, _ = cut(torch.randn(4, 3), 0)
    with pytest.raises(LayoutError, match="must be cut on exactly one mesh axis"):
        losses.cross_entropy(x, torch.zeros(4, dtype=torch.long))


def _square() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


LAYOUTS = [((Shard(0), Shard(1)), (6, 11)), ((Shard(0), Shard(1)), (3, 7, 4)), ((Shard(2), Shard(1)), (3, 7, 5))]


@on_ranks(4)
@pytest.mark.parametrize(("placements", "shape"), LAYOUTS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("laid_out", [True, False])
def test_rows_cut_by_another_axis(placements: Any, shape: tuple[int, ...], reduction: Any, laid_out: bool) -> None:
    torch.manual_seed(0)
    mesh, rows = _square(), (shape[0], *shape[2:])
    full = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, shape[1], rows)
    labels.view(-1)[1] = -100
    weight = torch.rand(shape[1], dtype=torch.float64)
    expected: Any = functional.cross_entropy(full, labels, weight, label_smoothing=0.1, reduction=reduction)
    expected.sum().backward()
    logits: Any = distribute_tensor(full.detach(), mesh, placements, src_data_rank=None).requires_grad_()
    batch = (Shard(placements[0].dim and placements[0].dim - 1), Replicate())
    target = distribute_tensor(labels, mesh, batch, src_data_rank=None) if laid_out else labels
    with loss_parallel(), CommDebugMode() as counts:
        loss: Any = functional.cross_entropy(logits, target, weight, label_smoothing=0.1, reduction=reduction)
    assert set(counts.get_comm_counts()) == {ALL_REDUCE}
    assert loss.placements == (batch if reduction == "none" else (Replicate(), Replicate()))
    torch.testing.assert_close(loss.full_tensor(), expected)
    loss.sum().backward()
    torch.testing.assert_close(logits.grad.full_tensor(), full.grad)


@on_ranks(4)
def test_rows_of_a_cut_sequence_that_was_flattened() -> None:
    torch.manual_seed(0)
    mesh, full = _square(), torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (3, 5))
    expected: Any = functional.cross_entropy(full.view(-1, 7), labels.view(-1))
    expected.backward()
    logits: Any = distribute_tensor(full.detach(), mesh, (Shard(1), Shard(2)), src_data_rank=None).requires_grad_()
    for target in (labels, distribute_tensor(labels, mesh, (Shard(1), Replicate()), src_data_rank=None)):
        logits.grad = None
        with loss_parallel(), CommDebugMode() as counts:
            loss: Any = functional.cross_entropy(logits.view(-1, 7), target.view(-1))
            loss.backward()
        assert set(counts.get_comm_counts()) == {ALL_REDUCE}
        torch.testing.assert_close(loss.full_tensor(), expected)
        torch.testing.assert_close(logits.grad.full_tensor(), full.grad)


@on_ranks(4)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "batchmean"])
def test_other_losses_of_cut_rows(reduction: Any) -> None:
    torch.manual_seed(0)
    mesh, placements = _square(), (Shard(0), Shard(1))
    student, teacher = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    labels = torch.randint(0, 7, (5,))
    rows = slice(0, 3) if mesh.get_local_rank("dp") == 0 else slice(3, 5)
    spread = [distribute_tensor(t, mesh, placements, src_data_rank=None) for t in (student, teacher)]
    plain_kl = functional.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="none").sum(1)
    wanted = {"none": plain_kl[rows], "sum": plain_kl.sum()}.get(reduction, plain_kl.mean())
    torch.testing.assert_close(losses.kl_div(*spread, dim=1, reduction=reduction), wanted)
    gathered = student.log_softmax(1)[range(5), labels]
    torch.testing.assert_close(losses.log_prob(spread[0], labels, dim=1), gathered[rows])
    soft = teacher.softmax(1)
    for target in (soft, distribute_tensor(soft, mesh, placements, src_data_rank=None)):
        if reduction == "batchmean":
            continue
        expected = functional.cross_entropy(student, soft, reduction=reduction)
        made = losses.cross_entropy(spread[0], target, reduction=reduction)
        torch.testing.assert_close(made, expected[rows] if reduction == "none" else expected)
