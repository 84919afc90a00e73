"""Covers: modules/owners.py."""

from __future__ import annotations

from typing import Any

from shoal_dtensor.modules.owners import in_turns


def test_items_that_need_the_same_owners_come_together() -> None:
    items: Any = [("a", [1]), ("b", []), ("c", [2]), ("d", [1]), ("e", [2, 3]), ("f", [])]
    turns: Any = in_turns(items)
    assert turns == [(["a", "d"], [1]), (["b"], []), (["c"], [2]), (["e"], [2, 3]), (["f"], [])]
    turns = in_turns(items, in_order=True)
    assert turns == [([*"abcdef"], [1, 2, 3])]
    assert in_turns([]) == []
