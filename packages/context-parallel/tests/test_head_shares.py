"""Covers: head_shares.py."""

from __future__ import annotations

import pytest

from shoal_context_parallel.attention.head_shares import HeadShares


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("query_heads", "key_heads"), [(8, 2), (6, 3), (6, 2), (5, 5), (4, 1)])
def test_each_query_head_finds_its_head_of_keys(
    query_heads: int, key_heads: int, ranks: int
) -> None:
    shares = HeadShares.of(query_heads, key_heads, ranks)
    found = []
    for rank in range(ranks):
        start, stop = shares.queries[rank]
        first_key, end_key = shares.keys[rank]
        local = shares.keys_of_queries(rank)
        if local is None:
            # complete groups, as torch repeats heads of keys
            local = [index for index in range(end_key - first_key) for _ in range(shares.group)]
        assert len(local) == stop - start
        found += [first_key + index for index in local]
    group = query_heads // key_heads
    assert found == [head // group for head in range(query_heads)]


def test_ranks_without_heads_read_no_keys() -> None:
    shares = HeadShares.of(2, 1, ranks=4)
    assert shares.keys[2:] == ((0, 0), (0, 0))
    assert shares.keys_of_queries(3) is None
