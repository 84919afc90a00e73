"""Putting rule tables together: names stand for all their overloads, a duplicate is an error, an overlay is scoped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from .._torch import OpOverload
from ..errors import ShoalTensorError
from ..policy import current, within
from .rule import Rule, Table

__all__ = ["DuplicateRuleError", "family", "merge", "overlay"]


class DuplicateRuleError(ShoalTensorError, ValueError):
    """Two tables give a rule for one operator."""


def family(rules: Mapping[str, Rule], *, unordered: bool = False) -> Table:
    """A table from `aten` names to rules.

    Each key is a space-separated list of names.  A name stands for all overloads that take tensors, functional and
    `out=`, and those of the in-place twin `name_`; `name.overload` stands for that one and comes before a plain name.
    Names that this version of torch lacks are skipped, and so are overloads that no function of torch leads to: those
    with a list to write to (`_foreach_add.List_out`), and TorchScript's own for lists and dicts of tensors.  With
    `unordered`, all rules are (see `Rule`).

    Example:
        >>> from .notation import product
        >>> table = family({"mm": product("m k, k n -> m n")})
        >>> torch.ops.aten.mm.out in table
        True
    """
    table: Table = {}
    exact: Table = {}
    for names, listed in rules.items():
        rule = replace(listed, unordered=True) if unordered else listed
        for name in names.split():
            base, _, overload = name.partition(".")
            if overload:
                packet = getattr(torch.ops.aten, base, None)
                if packet is not None and overload in packet.overloads():
                    exact[getattr(packet, overload)] = rule
            else:
                for op in (*_tensor_overloads(base), *_tensor_overloads(base + "_")):
                    if table.setdefault(op, rule) is not rule:
                        raise DuplicateRuleError(f"{op} is listed twice in one table")
    return table | exact


def _tensor_overloads(name: str) -> Iterator[Any]:
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        kinds = [str(argument.type) for argument in op._schema.arguments]
        if any("Tensor" in kind for kind in kinds) and overload not in _UNREACHED and not _fills_list(op):
            yield op


_UNREACHED = ("Dict_Tensor", "Tensor_list")


def _fills_list(op: OpOverload) -> bool:
    return any(argument.is_out and "List" in str(argument.type) for argument in op._schema.arguments)


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
