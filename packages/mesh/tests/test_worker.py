"""Covers: worker.py: the execution of a job on a rank."""

from __future__ import annotations

import time
import unittest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from shoal_mesh.testing import RankPool, on_ranks, rank_pool


class TestInAClass:
    scale = 3

    @on_ranks(2)
    def test_self_is_an_instance(self) -> None:
        assert self.scale == 3


def _rank_and_seed(add: int) -> tuple[int, float]:
    return dist.get_rank() + add, float(torch.rand(()))


def test_results_come_by_rank_and_random_numbers_start_alike() -> None:
    first, second = rank_pool(2).run(_rank_and_seed, 10), rank_pool(2).run(_rank_and_seed, add=10)
    assert [rank for rank, _ in first] == [10, 11]
    assert first == second


ENDS: list[float] = []


def _connects_late() -> None:
    """The next job needs a group, which rank 1 says it has half a second after the others."""
    connect = dist.init_process_group

    def late(*args: Any, **options: Any) -> None:
        connect(*args, **options)
        time.sleep(0.5)
        ENDS.append(time.monotonic())
        dist.init_process_group = connect

    if dist.get_rank() == 1:
        dist.init_process_group = late  # the worker takes it from there
    dist.destroy_process_group()


def _start_and_end() -> tuple[float, list[float]]:
    return time.monotonic(), ENDS


def test_a_job_starts_when_all_ranks_are_connected() -> None:
    """A job may end its group at once, and a rank that still connects to the others would fail."""
    with RankPool(2) as pool:
        pool.run(_connects_late)
        (start, _), (_, [connected]) = pool.run(_start_and_end)
    assert start >= connected


def _skips() -> None:
    raise unittest.SkipTest("not here")


def test_skips_are_skips() -> None:
    with pytest.raises(unittest.SkipTest, match="not here"):
        rank_pool(2).run(_skips)


def _leaves() -> None:
    dist.destroy_process_group()


def test_a_destroyed_group_comes_back() -> None:
    rank_pool(2).run(_leaves)
    assert rank_pool(2).run(dist.get_world_size) == [2, 2]


@settings(max_examples=5)
@given(st.integers(0, 100))
@on_ranks(2)
def test_hypothesis_chooses_here_and_the_body_runs_there(x: int) -> None:
    total = torch.tensor(x)
    dist.all_reduce(total)
    assert total.item() == 2 * x
