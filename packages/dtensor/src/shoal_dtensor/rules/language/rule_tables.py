"""Putting rule tables together: names stand for all their overloads, a duplicate is an error, an overlay is scoped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..._torch import OpOverload
from ...errors import ShoalTensorError
from ...scopes import current, entered
from .rule import Rule, Table


class DuplicateRuleError(ShoalTensorError, ValueError):
    """Two tables give a rule for one operator."""


def family(rules: Mapping[str, Rule], *, unordered: bool = False) -> Table:
    """A table from `aten` names to rules.

    Each key is a space-separated list of names.  A name stands for all overloads that take tensors, functional and
    `out=`, and those of the in-place twin `name_`; `name.overload` stands for that one and comes before a plain name.
    Names that this version of torch lacks are skipped, and so are overloads that no call with a DTensor leads to: those
    with a list to write to (`_foreach_add.List_out`), TorchScript's own for lists and dicts of tensors, and those that
    take a dim by its name (torch 2.11 has them; no DTensor has named dims).  With `unordered`, all rules are (see
    `Rule`).

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
        if overload not in ("Dict_Tensor", "Tensor_list") and _reached(op):
            yield op


def _reached(op: OpOverload) -> bool:
    """Whether it takes tensors, fills no list and takes no dim by its name."""
    kinds = [(argument, str(argument.type)) for argument in op._schema.arguments]
    fills_list = any(argument.is_out and "List" in kind for argument, kind in kinds)
    by_name = any(argument.name == "dim" and "str" in kind for argument, kind in kinds)
    return any("Tensor" in kind for _, kind in kinds) and not fills_list and not by_name


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
    with entered(current().under(table)):
        yield
