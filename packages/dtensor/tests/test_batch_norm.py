"""Running statistics of any layout, gradients that are wanted one by one.

Covers: rules/nn/norms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_dtensor import (
    CommunicationForbiddenError,
    Placement,
    Replicate,
    Shard,
    communication,
    distribute_tensor,
)
from shoal_dtensor.testing import on_threads, thread_meshes

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


def real(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def on_four(check: Callable[[Any], None]) -> None:
    """Run a check with gradients on four ranks that are threads."""
    meshes = thread_meshes((4,))

    def run(mesh: Any) -> None:
        with torch.enable_grad():
            check(mesh)

    on_threads([partial(run, mesh) for mesh in meshes], meshes)


@pytest.mark.parametrize("statistics", [R, S0, Shard(0, sizes=(1, 5, 0, 2))], ids=str)
@pytest.mark.parametrize("placement", [R, S0, S1, S2], ids=str)
@pytest.mark.parametrize("channels", [8, 3])
def test_running_statistics_are_updated_where_they_are(
    placement: Placement, statistics: Placement, channels: int
) -> None:
    if isinstance(statistics, Shard) and channels == 3:
        statistics = S0
    x, start = real(4, channels, 3), real(channels).abs()
    expected = start.clone(), start.clone()
    F.batch_norm(x, *expected, training=True)

    def check(mesh: Any) -> None:
        mean, var = (distribute_tensor(start, mesh, [statistics]) for _ in range(2))
        F.batch_norm(distribute_tensor(x, mesh, [placement]), mean, var, training=True)
        for got, wanted in zip((mean, var), expected, strict=True):
            assert got.placements[0] == statistics
            torch.testing.assert_close(got.full_tensor(), wanted)

    on_four(check)


def test_the_update_of_replicated_statistics_obeys_the_policy() -> None:
    def check(mesh: Any) -> None:
        mean, var = (distribute_tensor(torch.ones(8), mesh, [R]) for _ in range(2))
        x = distribute_tensor(torch.ones(4, 8), mesh, [S1])
        with communication("forbid"):
            F.batch_norm(x, mean, var, training=False)
            with pytest.raises(CommunicationForbiddenError, match="needs implicit communication"):
                F.batch_norm(x, mean, var, training=True)

    on_four(check)


@pytest.mark.parametrize("wanted", [0, 1, 2])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("placement", [R, S0, S1], ids=str)
def test_each_gradient_alone_can_be_differentiated_again(
    placement: Placement, training: bool, wanted: int
) -> None:
    """The meta kernel returns the input's gradient whether it is wanted or not; kernels do not."""
    tensors = [real(4, 3, 5), real(3), real(3)]

    def run(tensors: list[Any], statistics: list[Any]) -> Any:
        y = F.batch_norm(tensors[0], statistics[0], statistics[1], tensors[1], tensors[2], training)
        (first,) = torch.autograd.grad((y * y * y).sum(), tensors[wanted], create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), tensors[1])
        return second

    expected = run(
        [t.clone().requires_grad_() for t in tensors],
        [torch.zeros(3).double(), torch.ones(3).double()],
    )

    def check(mesh: Any) -> None:
        layouts = [placement, *([S0 if placement == S1 else R] * 2)]
        spread = [
            distribute_tensor(t, mesh, [p]).requires_grad_()
            for t, p in zip(tensors, layouts, strict=True)
        ]
        statistics = [
            distribute_tensor(t.double(), mesh, [R]) for t in (torch.zeros(3), torch.ones(3))
        ]
        torch.testing.assert_close(run(spread, statistics).full_tensor(), expected)

    on_four(check)
