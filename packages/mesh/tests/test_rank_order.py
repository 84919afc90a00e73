"""Covers: rank_order.py, and create.py's order of ranks, on real ranks."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from shoal_mesh import MeshError, all_gather, init_device_mesh
from shoal_mesh.errors import MeshTypeError
from shoal_mesh.groups.world import require_world
from shoal_mesh.mesh import rank_order
from shoal_mesh.mesh.create import measured_order
from shoal_mesh.mesh.rank_order import RankOrder, order_by_costs, smooth_costs
from shoal_mesh.testing import on_ranks

NEAR, FAR, OTHER_SWITCH = 1e-4, 1e-3, 1e-2


def _costs(host_of: list[int], switch_of: list[int] | None = None) -> list[list[float]]:
    def cost(a: int, b: int) -> float:
        if a == b:
            return 0.0
        if switch_of is not None and switch_of[a] != switch_of[b]:
            return OTHER_SWITCH
        return NEAR if host_of[a] == host_of[b] else FAR

    return [[cost(a, b) for b in range(len(host_of))] for a in range(len(host_of))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (2, 2, 2), (8, 1)])
def test_the_last_axis_stays_inside_of_hosts(shape: tuple[int, ...], seed: int) -> None:
    host_of = [0, 0, 0, 0, 1, 1, 1, 1]
    random.Random(seed).shuffle(host_of)
    order = order_by_costs(shape, _costs(host_of))
    assert sorted(order.ranks) == list(range(8))
    size = shape[-1]
    lines = [order.ranks[i : i + size] for i in range(0, 8, size)]
    assert all(len({host_of[rank] for rank in line}) == 1 for line in lines)
    assert order.after[-1] == pytest.approx((size - 1) * NEAR)


def test_hosts_of_one_switch_are_joined_before_others() -> None:
    host_of, switch_of = [0, 1, 2, 3] * 2, [0, 1, 0, 1] * 2
    order = order_by_costs((2, 2, 2), _costs(host_of, switch_of))
    assert order.ranks == (0, 4, 2, 6, 1, 5, 3, 7)
    assert order.before == pytest.approx((NEAR, FAR, OTHER_SWITCH))
    assert order.after == pytest.approx((OTHER_SWITCH, FAR, NEAR))


def test_an_exchange_mends_what_the_nearest_first_spoils() -> None:
    # three on each of two hosts, in pairs: one pair crosses, whatever is done
    costs = _costs([0, 0, 0, 1, 1, 1])
    order = order_by_costs((3, 2), costs)
    lines = [order.ranks[i : i + 2] for i in range(0, 6, 2)]
    assert sum(costs[a][b] == FAR for a, b in lines) == 1


def test_ranks_stay_in_order_where_nothing_is_gained() -> None:
    equal = _costs([0] * 6)
    assert order_by_costs((2, 3), equal).ranks == tuple(range(6))
    noisy = [
        [cost * (1 + 0.01 * (a * b % 5)) for b, cost in enumerate(row)]
        for a, row in enumerate(equal)
    ]
    assert order_by_costs((2, 3), noisy).ranks == tuple(range(6))
    order = order_by_costs((2, 4), _costs([0] * 4 + [1] * 4))
    assert order.ranks == tuple(range(8)) and order.before == order.after
    assert "axis 1: 0.300 ms -> 0.300 ms" in str(order)
    assert order_by_costs((1,), [[0.0]]) == RankOrder((0,), (0.0,), (0.0,))


@on_ranks(3)
def test_everyone_meets_everyone_once() -> None:
    met: list[int] = []

    def seconds(world: object, message: object, other: int) -> float:
        met.append(other)
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_order, "_message_seconds", seconds)
        costs = rank_order.measured_costs(require_world(), torch.device("cpu"))
    assert sorted(met) == [other for other in range(3) if other != require_world().rank()]
    assert costs == [[float(a != b) for b in range(3)] for a in range(3)]
    # they meet in one order, or wait forever
    assert len(measured_order((3,)).ranks) == 3


def test_what_differs_inside_of_a_host_is_kept() -> None:
    costs = [[0, 1.0, 5.0], [1.0, 0, 5.0], [5.0, 5.0, 0]]
    assert smooth_costs(costs, ["a"] * 3) == costs


@on_ranks(4)
def test_slow_links_decide_the_order() -> None:
    """Ranks 0 and 3 are as on one host, and ranks 1 and 2.

    Messages between the two pairs take longer.
    """
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

    real = rank_order._message_seconds
    slow: Any = Slow()
    patch.setattr(
        rank_order, "_message_seconds", lambda _, message, other: real(slow, message, other)
    )
    with patch.context():
        order = measured_order((2, 2))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), order="topology")
    patch.undo()
    assert order.ranks == (0, 3, 1, 2), str(order)
    assert order.before[1] > 0.1 > order.after[1]
    assert mesh.mesh.tolist() == [[0, 3], [1, 2]]
    rank = torch.tensor([mesh.get_rank()])
    assert all_gather(rank, (mesh, "tp")).tolist() == (
        [0, 3] if mesh.get_rank() in (0, 3) else [1, 2]
    )
    assert sorted(all_gather(rank, (mesh, ("dp", "tp"))).tolist()) == [0, 1, 2, 3]


@on_ranks(2)
def test_wrong_orders_are_refused() -> None:
    with pytest.raises(MeshError, match="'rank' or 'topology'"):
        init_device_mesh("cpu", (2,), order="fastest")
    with pytest.raises(MeshTypeError, match="'rank' or 'topology'"):
        init_device_mesh("cpu", (2,), order=3)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(MeshError, match="needs 3 ranks"):
        measured_order((3,))
