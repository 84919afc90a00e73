"""Covers: link_costs.py, and create.py's order of ranks, on real ranks."""

from __future__ import annotations

import time

import pytest
import torch

from shoal_mesh import MeshError, all_gather, init_device_mesh
from shoal_mesh.errors import MeshTypeError
from shoal_mesh.groups import link_costs
from shoal_mesh.groups.link_costs import _opponent, smoothed
from shoal_mesh.groups.world import require_world
from shoal_mesh.mesh.create import measured_order
from shoal_mesh.testing import on_ranks


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_everyone_meets_everyone_once(size: int) -> None:
    seats = size + size % 2
    met = [[_opponent(rank, turn, seats) for turn in range(seats - 1)] for rank in range(size)]
    for rank, others in enumerate(met):
        assert sorted(others) == [other for other in range(seats) if other != rank]
        assert all(met[other][turn] == rank for turn, other in enumerate(others) if other < size)


def test_what_differs_inside_of_a_host_is_kept() -> None:
    costs = [[0, 1.0, 5.0], [1.0, 0, 5.0], [5.0, 5.0, 0]]
    assert smoothed(costs, ["a"] * 3) == costs


@on_ranks(4)
def test_slow_links_decide_the_order() -> None:
    """Ranks 0 and 3 are as on one host, and ranks 1 and 2: messages between the two pairs take longer."""
    world, patch = require_world(), pytest.MonkeyPatch()

    class Slow:
        def __init__(self) -> None:
            self.size, self.rank = world.size, world.rank

        def send(self, message: list[torch.Tensor], other: int, tag: int) -> object:
            if {self.rank(), other} not in ({0, 3}, {1, 2}):
                time.sleep(0.2)
            return world.send(message, other, tag)

        def recv(self, message: list[torch.Tensor], other: int, tag: int) -> object:
            return world.recv(message, other, tag)

    real = link_costs._seconds
    patch.setattr(link_costs, "_seconds", lambda _, message, other: real(Slow(), message, other))  # type: ignore[arg-type]  # stands in for a group
    with patch.context():
        order = measured_order((2, 2))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), order="topology")
    patch.undo()
    assert order.ranks == (0, 3, 1, 2), str(order)
    assert order.before[1] > 0.1 > order.after[1]
    assert mesh.mesh.tolist() == [[0, 3], [1, 2]]
    rank = torch.tensor([mesh.get_rank()])
    assert all_gather(rank, (mesh, "tp")).tolist() == ([0, 3] if mesh.get_rank() in (0, 3) else [1, 2])
    assert sorted(all_gather(rank, (mesh, ("dp", "tp"))).tolist()) == [0, 1, 2, 3]


@on_ranks(2)
def test_wrong_orders_are_refused() -> None:
    with pytest.raises(MeshError, match="'rank' or 'topology'"):
        init_device_mesh("cpu", (2,), order="fastest")
    with pytest.raises(MeshTypeError):
        init_device_mesh("cpu", (2,), order=3)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(MeshError):
        measured_order((3,))
