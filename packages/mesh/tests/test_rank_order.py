"""Covers: rank_order.py."""

from __future__ import annotations

import random

import pytest

from shoal_mesh.mesh.rank_order import RankOrder, order_by_costs

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
    costs = _costs([0, 0, 0, 1, 1, 1])  # three on each of two hosts, in pairs: one pair crosses, whatever is done
    order = order_by_costs((3, 2), costs)
    lines = [order.ranks[i : i + 2] for i in range(0, 6, 2)]
    assert sum(costs[a][b] == FAR for a, b in lines) == 1


def test_ranks_stay_in_order_where_nothing_is_gained() -> None:
    equal = _costs([0] * 6)
    assert order_by_costs((2, 3), equal).ranks == tuple(range(6))
    noisy = [[cost * (1 + 0.01 * (a * b % 5)) for b, cost in enumerate(row)] for a, row in enumerate(equal)]
    assert order_by_costs((2, 3), noisy).ranks == tuple(range(6))
    order = order_by_costs((2, 4), _costs([0] * 4 + [1] * 4))
    assert order.ranks == tuple(range(8)) and order.before == order.after
    assert "axis 1: 0.300 ms -> 0.300 ms" in str(order)
    assert order_by_costs((1,), [[0.0]]) == RankOrder((0,), (0.0,), (0.0,))
