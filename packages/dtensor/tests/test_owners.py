"""Covers: modules/owners.py."""

from __future__ import annotations

from typing import Any

from shoal_dtensor.modules.owners import batched_by_owner


def test_items_that_need_the_same_owners_come_together() -> None:
    items: Any = [("a", [1]), ("b", []), ("c", [2]), ("d", [1]), ("e", [2, 3]), ("f", [])]
    turns: Any = batched_by_owner(items)
    assert turns == [(["a", "d"], [1]), (["b"], []), (["c"], [2]), (["e"], [2, 3]), (["f"], [])]
    turns = batched_by_owner(items, as_one_group=True)
    assert turns == [([*"abcdef"], [1, 2, 3])]
    assert batched_by_owner([]) == []
