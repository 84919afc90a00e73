"""Covers: averages over ranks of float16 and bfloat16 near the ends of their range.

No sum may leave the range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, full_tensor
from shoal_dtensor.testing import on_threads, thread_meshes

# 4 times the first is infinite in float16; 64 ranks of the other have terms that are zero there.
VALUES = [60_000.0, 1e-6]
HALF_TYPES = [torch.float16, torch.bfloat16]


def _spread(mesh: Any, x: Tensor, placement: Any = None) -> Any:
    return distribute_tensor(x, mesh, [placement or Shard(0)], src_data_rank=None)


def _on_ranks(program: Callable[[Any], Any], *shape: int) -> Tensor:
    """The global result of a program, the same on all simulated ranks."""

    def run(mesh: Any) -> Tensor:
        result = program(mesh)
        whole: Tensor = full_tensor(result)
        return whole

    meshes = thread_meshes(shape)
    first, *others = on_threads([partial(run, mesh) for mesh in meshes], meshes)
    assert all(torch.equal(first, other) for other in others)
    return first


def _assert_near(result: Tensor, want: float | Tensor) -> None:
    """Compare with float64 up to the half type's rounding, or one step of its smallest numbers."""
    rtol = 2e-3 if result.dtype is torch.float16 else 1.6e-2
    expected = torch.as_tensor(want, dtype=torch.float64).expand_as(result)
    torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=6e-8)


@pytest.mark.parametrize("ranks", [4, 64])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_partial_averages_that_are_reduced(dtype: torch.dtype, value: float, ranks: int) -> None:
    local = torch.full((ranks, 3), value, dtype=dtype)

    def program(target: Any, mesh: Any, *, in_background: bool = False) -> DTensor:
        source = DTensor.from_local(local, mesh, [Partial("avg")])
        return source.redistribute(placements=[target], async_op=in_background)

    for target in (Replicate(), Shard(0), Shard(1)):
        _assert_near(_on_ranks(partial(program, target), ranks), value)
    _assert_near(_on_ranks(partial(program, Replicate(), in_background=True), ranks), value)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_averages_over_two_axes(dtype: torch.dtype, value: float) -> None:
    # A sum and an average are reduced in one collective.
    for first, share in (("avg", 1.0), ("sum", 0.5)):
        local = torch.full((4, 3), value * share, dtype=dtype)
        placements = [Partial(first), Partial("avg")]
        result = _on_ranks(partial(DTensor.from_local, local, placements=placements), 2, 4)
        _assert_near(result, value)


MEANS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x)),
    "std_mean": lambda x: torch.std_mean(x, 0)[1],
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True).mean() + x.mean(),
    "avg_pool": lambda x: F.adaptive_avg_pool1d(x.t(), 1),
}


def _mean_of(name: str, x: Tensor, layout: Any, mesh: Any) -> Any:
    return MEANS[name](_spread(mesh, x, layout))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("name", MEANS)
def test_means_of_sharded_elements(name: str, dtype: torch.dtype, value: float) -> None:
    # Over uneven shards, a sum in the half type was divided afterwards.
    layouts = [(16, Shard(0)), (17, Shard(0)), (17, Shard(0, sizes=(16, 0, 1, 0)))]
    for rows, layout in layouts:
        x = torch.full((rows, 3), value, dtype=dtype)
        result = _on_ranks(partial(_mean_of, name, x, layout), 4)
        _assert_near(result, value)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_deviations(dtype: torch.dtype) -> None:
    x = torch.full((17, 3), 60_000.0, dtype=dtype)
    x[::2] /= 2
    result = _on_ranks(lambda mesh: _spread(mesh, x).std(0), 4)
    _assert_near(result, x.double().std(0))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", ["rows", "uneven rows", "ignored rows", "classes"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_mean_log_likelihoods(
    dtype: torch.dtype, value: float, layout: str, weighted: bool
) -> None:
    rows = 17 if layout == "uneven rows" else 16
    log_probs, target = torch.full((rows, 5), -value, dtype=dtype), torch.arange(rows) % 5
    if layout == "ignored rows":
        target[4:] = -100
    weight = torch.full((5,), 7.0, dtype=dtype) if weighted else None
    of_classes = layout == "classes"

    def program(mesh: Any) -> Any:
        x = _spread(mesh, log_probs, Shard(1) if of_classes else Shard(0))
        t = _spread(mesh, target, Replicate() if of_classes else Shard(0))
        w = None if weight is None else _spread(mesh, weight, Replicate())
        return F.nll_loss(x, t, w)

    _assert_near(_on_ranks(program, 4), value)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_the_gradient_of_a_mean_loss(dtype: torch.dtype) -> None:
    x = torch.full((17, 3), 100.0, dtype=dtype)

    def program(mesh: Any) -> Any:
        leaf = _spread(mesh, x).requires_grad_()
        with torch.enable_grad():
            # times 1,000, as of a loss that is scaled, the gradient of the sum is infinite
            loss: Any = F.mse_loss(leaf, torch.zeros_like(leaf)) * 1000
            loss.backward()
        assert isinstance(leaf.grad, DTensor)
        return leaf.grad

    _assert_near(_on_ranks(program, 4), 1000 * 2 * 100.0 / 51)


def _over_classes(function: Any, x: Tensor, mesh: Any) -> Any:
    return function(_spread(mesh, x, Shard(1)), 1)


@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32], ids=str)
def test_softmax_over_more_classes_than_float16_counts(dtype: torch.dtype) -> None:
    # The sum of the exponentials, 70,000, was infinite in float16: all probabilities were zero.
    x = torch.zeros(1, 70_000, dtype=dtype)
    functions: list[Any] = [torch.softmax, torch.log_softmax]
    for function in functions:
        result = _on_ranks(partial(_over_classes, function, x), 2)
        _assert_near(result, function(x.double(), 1))
    result = _on_ranks(lambda mesh: _spread(mesh, x, Shard(1)).logsumexp(1), 2)
    _assert_near(result, x.double().logsumexp(1))
