"""Covers: programs of DTensors on the simulated ranks of testing/__init__.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_dtensor import DTensor, Partial, Replicate, Shard, coalesce, distribute_tensor
from shoal_dtensor.testing import on_threads, simulate_ranks, thread_meshes
from shoal_mesh import DeviceMesh, abstract_mesh


def test_reductions_over_different_axes_do_not_travel_together() -> None:
    def reduced(mesh: DeviceMesh) -> list[float]:
        row, column = mesh.get_coordinate() or (0, 0)
        ones = torch.ones(1)
        with coalesce():
            sums = [
                DTensor.from_local(ones * value, mesh, placements).redistribute(
                    placements=[Replicate()] * 2
                )
                for value, placements in (
                    (row, [Partial(), Replicate()]),
                    (column * 10, [Replicate(), Partial()]),
                )
            ]
        return [each.item() for each in sums]

    meshes = thread_meshes((2, 2))
    assert on_threads([partial(reduced, mesh) for mesh in meshes], meshes) == [[1.0, 10.0]] * 4


@pytest.mark.parametrize("source", [0, None])
def test_a_program_of_dtensors_runs_forward_and_backward(source: int | None) -> None:
    whole = torch.randn(5, 3, dtype=torch.float64)

    def run(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x: Any = distribute_tensor(
                whole, mesh, [Shard(0), Shard(1)], src_data_rank=source
            ).requires_grad_()
            terms = distribute_tensor(whole, mesh, [Partial(), Shard(0)], src_data_rank=source)
            total: Any = ((x @ x.t()).sum() * 2 + (terms * x).sum()).full_tensor()
            total.backward()
        return total.detach(), x.grad.full_tensor()

    leaf = whole.clone().requires_grad_()
    expected = (leaf @ leaf.t()).sum() * 2 + (whole * leaf).sum()
    expected.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
    for total, gradient in simulate_ranks(abstract_mesh((2, 3)), run):
        torch.testing.assert_close(total, expected.detach())
        torch.testing.assert_close(gradient, leaf.grad)
