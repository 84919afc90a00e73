"""Covers: plan/simulated_mesh.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal_mesh import DeviceMesh, abstract_mesh, all_gather, all_reduce
from shoal_tp_styles.plan.simulated_mesh import on_simulated_ranks


def test_ranks_of_several_axes_meet_along_each() -> None:
    def run(mesh: DeviceMesh) -> tuple[list[int], list[int]]:
        rank = torch.tensor([mesh.get_rank()])
        return all_gather(rank, (mesh, "a"), 0).tolist(), all_gather(rank, (mesh, "b"), 0).tolist()

    results = on_simulated_ranks(abstract_mesh((2, 3), ("a", "b")), run)
    assert results == [([b, 3 + b], [3 * a, 3 * a + 1, 3 * a + 2]) for a in range(2) for b in range(3)]


@pytest.mark.parametrize(("ranks", "sizes"), [(4, (2, 2)), (8, (2, 4)), (8, (4, 2)), (6, (2, 3))])
def test_groups_of_an_axis_that_is_unflattened(ranks: int, sizes: tuple[int, int]) -> None:
    def run(mesh: DeviceMesh) -> Tensor:
        return all_reduce(torch.tensor(mesh.get_rank()), (mesh.unflatten(0, sizes), 1))

    results = on_simulated_ranks(abstract_mesh((ranks,)), run)
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
        on_simulated_ranks(abstract_mesh((2,)), run)


def test_views_of_two_simulations_are_not_equal() -> None:
    first, second = (on_simulated_ranks(abstract_mesh((2,)), lambda mesh: mesh)[0] for _ in range(2))
    assert first == first and first != second  # equality is the test
