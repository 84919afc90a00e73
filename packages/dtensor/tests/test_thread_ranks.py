"""Covers: testing/thread_ranks.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shoal_dtensor import DTensor, Partial, Replicate, coalesce
from shoal_dtensor.testing import on_threads, thread_meshes
from shoal_mesh import DeviceMesh, all_reduce
from shoal_mesh.errors import DeadlockError


def test_communicators_know_their_ranks() -> None:
    meshes = thread_meshes((2, 2))
    assert [mesh.comm(0).ranks for mesh in meshes] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [mesh.comm((1, 0)).ranks for mesh in meshes] == [(0, 2, 1, 3)] * 4


def test_every_rank_begins_with_the_seed() -> None:
    meshes = thread_meshes((2,))
    for seed in (0, 5):
        expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        for drawn in on_threads([partial(torch.rand, 3)] * 2, meshes, seed):
            assert torch.equal(drawn, expected)


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


def test_ranks_that_wait_for_each_other_in_different_groups_fail_at_once() -> None:
    def reduced(mesh: DeviceMesh) -> torch.Tensor:
        return all_reduce(torch.ones(1), (mesh, mesh.get_rank() % 2))

    meshes = thread_meshes((2, 2))
    with pytest.raises(DeadlockError, match=r"rank 1: waits in all_reduce .* needs rank 0"):
        on_threads([partial(reduced, mesh) for mesh in meshes], meshes)
    assert (
        on_threads([partial(all_reduce, torch.ones(1), (mesh, 0)) for mesh in meshes], meshes)
        == [2.0] * 4
    )


def test_a_collective_outside_of_a_run_is_an_error_before_and_after_it() -> None:
    """It waited for ever: no other rank comes."""
    meshes = thread_meshes((2,))

    def reduce(mesh: DeviceMesh) -> torch.Tensor:
        return all_reduce(torch.ones(()), (mesh, 0))

    for _ in range(2):
        with pytest.raises(DeadlockError, match="outside of a run"):
            reduce(meshes[0])
        results = on_threads([partial(reduce, mesh) for mesh in meshes], meshes)
        assert [result.item() for result in results] == [2.0, 2.0]
