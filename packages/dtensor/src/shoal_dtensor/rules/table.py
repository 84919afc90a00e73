"""Putting rule tables together: a duplicate is an error, an overlay is scoped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ShoalTensorError
from ..policy import current, within
from .rule import Table

__all__ = ["DuplicateRuleError", "merge", "overlay"]


class DuplicateRuleError(ShoalTensorError, ValueError):
    """Two tables give a rule for one operator."""


def merge(**tables: Table) -> Table:
    """One table out of several, each named.

    Raises:
        DuplicateRuleError: if two of them have the same operator.
    """
    merged: Table = {}
    owner: dict[object, str] = {}
    for name, table in tables.items():
        for op, rule in table.items():
            if op in merged:
                raise DuplicateRuleError(f"{op} has a rule in the tables {owner[op]!r} and {name!r}")
            merged[op], owner[op] = rule, name
    return merged


@contextmanager
def overlay(table: Table) -> Iterator[None]:
    """Inside the block, rules of `table` come before all others; blocks nest, and threads do not see each other's."""
    with within(overlays=(table, *current().overlays)):
        yield
