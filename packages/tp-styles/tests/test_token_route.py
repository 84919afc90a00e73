"""Covers: token_route.py, module_sharding.py: integers and small tensors, no ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal_dtensor import Shard, StridedShard
from shoal_mesh.testing import all_ranks, fake_world
from shoal_tp_styles import Heads
from shoal_tp_styles.experts.token_route import (
    ExpertExchange,
    counts_of,
    first_pairs,
    sorted_choices,
    within_capacity,
)
from shoal_tp_styles.sharding.module_sharding import ExpertOwner, HeadShard


def route_of(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """The sorted pairs, their bounds, and the number of each expert."""
    pairs, bounds = sorted_choices(chosen, experts)
    return pairs, bounds.tolist(), counts_of(bounds.tolist())


def test_pairs_are_sorted_by_expert_and_each_experts_by_token() -> None:
    route = route_of(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
    assert route[2] == [2, 2, 2, 0]
    assert first_pairs(*route).tolist() == [1, 2, 3, 5, 0, 4]  # of tokens 0 1 1 2 0 2


def test_choices_that_are_no_expert_are_left_out() -> None:
    route = route_of(torch.tensor([[4, 0], [-1, 3]]), 4)
    assert (route[2], first_pairs(*route).tolist()) == ([1, 0, 0, 1], [1, 3])
    assert first_pairs(*route[:2], [0, 0, 0, 1]).tolist() == [3]
    empty = route_of(torch.zeros(0, 2, dtype=torch.long), 3)
    assert (empty[2], len(first_pairs(*empty))) == ([0, 0, 0], 0)


@pytest.mark.parametrize("factor", [0.5, 1.0, 9.0])
def test_the_last_tokens_of_all_ranks_exceed_the_capacity(factor: float) -> None:
    chosen = torch.tensor([[0], [0], [1], [0], [0], [2], [0]])
    room = -(-factor * len(chosen) // 3)
    pairs, bounds, counts = route_of(chosen, 3)
    whole = within_capacity([counts], factor, len(chosen))
    parts: Any = chosen
    ranks = [route_of(part, 3) for part in parts.split([3, 0, 4])]
    kept = within_capacity([route[2] for route in ranks], factor, len(chosen))
    assert (
        [sum(column) for column in zip(*kept, strict=True)]
        == whole[0]
        == [min(room, n) for n in (5, 1, 1)]
    )
    found = [
        first_pairs(*route[:2], row) + start
        for route, row, start in zip(ranks, kept, (0, 3, 3), strict=True)
    ]
    assert torch.equal(
        torch.cat(found).sort().values, first_pairs(pairs, bounds, whole[0]).sort().values
    )


def test_what_an_exchange_sends_and_receives() -> None:
    with fake_world(2):
        exchange = ExpertExchange.of([[2, 1, 4, 0], [0, 3, 1, 1]], [3, 1], all_ranks().comm(0))
    assert (exchange.sends, exchange.receives, exchange.rows_per_own_expert) == (
        [7, 0],
        [7, 4],
        [[2, 1, 4], [0, 3, 1]],
    )


def test_experts_and_features_of_each_rank() -> None:
    assert HeadShard(1, Heads(5, 1, chunked=True), 2).on(2) == StridedShard(
        1, split_factor=2, sizes=(3, 2)
    )
    assert [ExpertOwner(i, 3, 7).on(2) for i in range(3)] == [
        Shard(0, sizes=sizes) for sizes in ((7, 0), (7, 0), (0, 7))
    ]
