"""Covers: token_route.py, dim_shards.py: integers and small tensors, no ranks."""

from __future__ import annotations

import pytest
import torch

from shoal_dtensor import Shard, StridedShard
from shoal_mesh.testing import fake_world
from shoal_tp_styles.experts.token_route import ExpertExchange, TokenRoute, sorted_choices, within_capacity
from shoal_tp_styles.sharding.dim_shards import ExpertOwner, PackedShard
from shoal_tp_styles.testing import all_ranks


def route_of(chosen: torch.Tensor, experts: int) -> TokenRoute:
    pairs, bounds = sorted_choices(chosen, experts)
    return TokenRoute.of(pairs, bounds.tolist(), chosen.shape[-1])


def test_pairs_are_sorted_by_expert_and_each_experts_by_token() -> None:
    route = route_of(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
    assert route.counts == [2, 2, 2, 0]
    assert route.tokens.tolist() == [0, 1, 1, 2, 0, 2]
    assert route.pairs.tolist() == [1, 2, 3, 5, 0, 4]


def test_choices_that_are_no_expert_are_left_out() -> None:
    route = route_of(torch.tensor([[4, 0], [-1, 3]]), 4)
    assert (route.counts, route.tokens.tolist(), route.pairs.tolist()) == ([1, 0, 0, 1], [0, 1], [1, 3])
    empty = route_of(torch.zeros(0, 2, dtype=torch.long), 3)
    assert (empty.counts, len(empty.tokens)) == ([0, 0, 0], 0)


@pytest.mark.parametrize("factor", [0.5, 1.0, 9.0])
def test_the_last_tokens_of_all_ranks_exceed_the_capacity(factor: float) -> None:
    chosen = torch.tensor([[0], [0], [1], [0], [0], [2], [0]])
    room = -(-factor * len(chosen) // 3)
    whole = within_capacity([route_of(chosen, 3).counts], factor, len(chosen))
    ranks = [route_of(part, 3) for part in chosen.split([3, 0, 4])]  # type: ignore[no-untyped-call]  # torch
    kept = within_capacity([route.counts for route in ranks], factor, len(chosen))
    assert [sum(column) for column in zip(*kept, strict=True)] == whole[0] == [min(room, n) for n in (5, 1, 1)]
    tokens = [route.keeping(row).tokens + start for route, row, start in zip(ranks, kept, (0, 3, 3), strict=True)]
    assert torch.equal(torch.cat(tokens).sort().values, route_of(chosen, 3).keeping(whole[0]).tokens.sort().values)


def test_what_an_exchange_sends_and_receives() -> None:
    with fake_world(2):
        exchange = ExpertExchange.of([[2, 1, 4, 0], [0, 3, 1, 1]], [3, 1], all_ranks.__wrapped__().comm(0))
    assert (exchange.sends, exchange.receives, exchange.own) == ([7, 0], [7, 4], [[2, 1, 4], [0, 3, 1]])


def test_experts_and_features_of_each_rank() -> None:
    assert PackedShard(1, 2, 5).on(2) == StridedShard(1, split_factor=2, sizes=(3, 2))
    assert [ExpertOwner(i, 3, 7).on(2) for i in range(3)] == [
        Shard(0, sizes=sizes) for sizes in ((7, 0), (7, 0), (0, 7))
    ]
