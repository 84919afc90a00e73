"""Covers: analysis/grid.py, analysis/find_grid.py."""

from __future__ import annotations

import torch

from shoal_lab.analysis.find_grid import find_grid
from shoal_lab.analysis.grid import MeshGrid
from shoal_lab.records import RankRecord


def test_the_last_axis_is_the_fastest() -> None:
    grid = MeshGrid.of({"dp": 2, "tp": 3})
    assert [grid.coordinate(rank) for rank in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert grid.groups(("dp",)) == [(0, 3), (1, 4), (2, 5)]
    assert grid.groups(("dp", "tp")) == [tuple(range(6))]
    assert grid.position(5, "tp") == 2


def test_sets_of_axes_leave_out_axes_of_one_rank() -> None:
    grid = MeshGrid.of({"pp": 1, "dp": 2, "tp": 2})
    assert list(grid.subsets()) == [("dp",), ("tp",), ("dp", "tp")]


def test_names_of_axes_come_from_the_meshes_of_a_script() -> None:
    record = RankRecord(meshes=[(("dp", "tp"), torch.arange(4).view(2, 2).tolist())])
    assert str(find_grid({"ranks": 4}, [record])) == "dp=2, tp=2"
    # the user's names hold
    assert str(find_grid({"a": 2, "b": 2}, [record])) == "a=2, b=2"


def test_a_mesh_of_some_ranks_or_in_another_order_names_no_axes() -> None:
    partial = RankRecord(meshes=[(("dp",), [0, 1])])
    reverse = RankRecord(meshes=[(("dp", "tp"), [[3, 2], [1, 0]])])
    for record in (partial, reverse):
        assert str(find_grid({"ranks": 4}, [record])) == "ranks=4"


def test_axes_come_from_process_groups_where_there_is_no_mesh() -> None:
    record = RankRecord(groups=[(0, 1), (2, 3), (0, 2), (1, 3)])
    grid = find_grid({"ranks": 4}, [record])
    assert grid.sizes == (2, 2)
    assert grid.groups((grid.names[1],)) == [(0, 1), (2, 3)]


def test_groups_that_are_no_grid_give_no_axes() -> None:
    record = RankRecord(groups=[(0, 1), (0, 3)])
    assert str(find_grid({"ranks": 4}, [record])) == "ranks=4"
