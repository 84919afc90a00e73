"""Covers: losses/logits.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from shoal_dtensor import Replicate, Shard, distribute_tensor
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import LayoutError, loss_parallel, losses
from tp_checks import ALL_REDUCE, sharded


def _square() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


LAYOUTS = [
    ((Shard(0), Shard(1)), (6, 11)),
    ((Shard(0), Shard(1)), (3, 7, 4)),
    ((Shard(2), Shard(1)), (3, 7, 5)),
]


@on_ranks(4)
@pytest.mark.parametrize(("placements", "shape"), LAYOUTS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("as_dtensor", [True, False])
def test_rows_sharded_by_another_axis(
    placements: Any, shape: tuple[int, ...], reduction: Any, as_dtensor: bool
) -> None:
    torch.manual_seed(0)
    mesh, rows = _square(), (shape[0], *shape[2:])
    full = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, shape[1], rows)
    labels.view(-1)[1] = -100
    weight = torch.rand(shape[1], dtype=torch.float64)
    expected: Any = functional.cross_entropy(
        full, labels, weight, label_smoothing=0.1, reduction=reduction
    )
    expected.sum().backward()
    logits: Any = distribute_tensor(
        full.detach(), mesh, placements, src_data_rank=None
    ).requires_grad_()
    batch = (Shard(placements[0].dim and placements[0].dim - 1), Replicate())
    target = distribute_tensor(labels, mesh, batch, src_data_rank=None) if as_dtensor else labels
    with loss_parallel(), CommDebugMode() as counts:
        loss: Any = functional.cross_entropy(
            logits, target, weight, label_smoothing=0.1, reduction=reduction
        )
    assert set(counts.get_comm_counts()) == {ALL_REDUCE}
    assert loss.placements == (batch if reduction == "none" else (Replicate(), Replicate()))
    torch.testing.assert_close(loss.full_tensor(), expected)
    loss.sum().backward()
    torch.testing.assert_close(logits.grad.full_tensor(), full.grad)


@on_ranks(4)
def test_rows_of_a_flattened_sharded_sequence() -> None:
    torch.manual_seed(0)
    mesh, full = _square(), torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (3, 5))
    expected: Any = functional.cross_entropy(full.view(-1, 7), labels.view(-1))
    expected.backward()
    logits: Any = distribute_tensor(
        full.detach(), mesh, (Shard(1), Shard(2)), src_data_rank=None
    ).requires_grad_()
    for target in (
        labels,
        distribute_tensor(labels, mesh, (Shard(1), Replicate()), src_data_rank=None),
    ):
        logits.grad = None
        with loss_parallel(), CommDebugMode() as counts:
            loss: Any = functional.cross_entropy(logits.view(-1, 7), target.view(-1))
            loss.backward()
        assert set(counts.get_comm_counts()) == {ALL_REDUCE}
        torch.testing.assert_close(loss.full_tensor(), expected)
        torch.testing.assert_close(logits.grad.full_tensor(), full.grad)


@on_ranks(4)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "batchmean"])
def test_other_losses_of_sharded_rows(reduction: Any) -> None:
    torch.manual_seed(0)
    mesh, placements = _square(), (Shard(0), Shard(1))
    student, teacher = (
        torch.randn(5, 7, dtype=torch.float64),
        torch.randn(5, 7, dtype=torch.float64),
    )
    labels = torch.randint(0, 7, (5,))
    rows = slice(0, 3) if mesh.get_local_rank("dp") == 0 else slice(3, 5)
    spread = [
        distribute_tensor(t, mesh, placements, src_data_rank=None) for t in (student, teacher)
    ]
    plain_kl = functional.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="none").sum(
        1
    )
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


@on_ranks(2)
def test_logits_with_other_layouts_are_refused() -> None:
    with pytest.raises(LayoutError, match="vocab=Vocab"):
        losses.cross_entropy(torch.randn(2, 3), torch.zeros(2, dtype=torch.long))
    x, _ = sharded(torch.randn(4, 3), 0)
    with pytest.raises(LayoutError, match="must be sharded on exactly one mesh axis"):
        losses.cross_entropy(x, torch.zeros(4, dtype=torch.long))
