"""Covers: lab/simulated_ranks.py."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal_mesh import DeviceMesh, _torch, abstract_mesh, all_gather, all_reduce
from shoal_mesh.errors import DeadlockError
from shoal_mesh.lab import on_threads, simulate_ranks, thread_meshes
from shoal_mesh.testing import rank_pool


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


def test_ranks_that_wait_for_each_other_in_different_groups_fail_at_once() -> None:
    def reduced(mesh: DeviceMesh) -> Tensor:
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

    def reduce(mesh: DeviceMesh) -> Tensor:
        return all_reduce(torch.ones(()), (mesh, 0))

    for _ in range(2):
        with pytest.raises(DeadlockError, match="outside of a run"):
            reduce(meshes[0])
        results = on_threads([partial(reduce, mesh) for mesh in meshes], meshes)
        assert [result.item() for result in results] == [2.0, 2.0]


def test_ranks_of_several_axes_meet_along_each() -> None:
    def run(mesh: DeviceMesh) -> tuple[list[int], list[int]]:
        rank = torch.tensor([mesh.get_rank()])
        return all_gather(rank, (mesh, "a"), 0).tolist(), all_gather(rank, (mesh, "b"), 0).tolist()

    results = simulate_ranks(abstract_mesh((2, 3), ("a", "b")), run)
    assert results == [
        ([b, 3 + b], [3 * a, 3 * a + 1, 3 * a + 2]) for a in range(2) for b in range(3)
    ]


@pytest.mark.parametrize(("ranks", "sizes"), [(4, (2, 2)), (8, (2, 4)), (8, (4, 2)), (6, (2, 3))])
def test_groups_of_an_axis_that_is_unflattened(ranks: int, sizes: tuple[int, int]) -> None:
    def run(mesh: DeviceMesh) -> Tensor:
        return all_reduce(torch.tensor(mesh.get_rank()), (mesh.unflatten(0, sizes), 1))

    results = simulate_ranks(abstract_mesh((ranks,)), run)
    width = sizes[1]
    assert [int(each) for each in results] == [
        sum(range(first - first % width, first - first % width + width)) for first in range(ranks)
    ]


def test_an_error_of_one_rank_ends_all() -> None:
    def run(mesh: DeviceMesh) -> None:
        if mesh.get_rank() == 1:
            raise ValueError("one of them")
        all_reduce(torch.zeros(1), (mesh, 0))

    with pytest.raises(ValueError, match="one of them"):
        simulate_ranks(abstract_mesh((2,)), run)


def test_views_of_two_simulations_are_not_equal() -> None:
    first, second = (simulate_ranks(abstract_mesh((2,)), lambda mesh: mesh)[0] for _ in range(2))
    assert first == first and first != second  # equality is the test


def state_of_process() -> list[Any]:
    world = dist.group.WORLD
    groups = len(_torch.WORLDS.pg_map)
    numbers = [torch.get_rng_state().tolist(), random.getstate(), torch.get_default_dtype()]
    names = [dist.get_rank(), dist.get_world_size(), dist.get_backend()]
    return [world, groups, type(_torch.WORLDS), *numbers, *names, dict(os.environ)]


def simulate_in_job() -> list[bool]:
    """Run a plan on simulated ranks inside of a rank of a job, before and after its own calls."""

    def run(mesh: DeviceMesh) -> Tensor:
        inside.append(dist.get_rank())
        torch.rand(3)
        return all_reduce(torch.ones(1), (mesh, 0))

    total = torch.ones(1)
    dist.all_reduce(total)
    before = state_of_process()
    inside: list[int] = []
    results = simulate_ranks(abstract_mesh((4,)), run)
    after = state_of_process()
    dist.all_reduce(total)
    everyone = inside == [dist.get_rank()] * 4
    return [before == after, results == [4.0] * 4, total.item() == 4, everyone]


def test_the_job_around_a_simulation_is_unchanged() -> None:
    assert rank_pool(2).run(simulate_in_job) == [[True] * 4] * 2
