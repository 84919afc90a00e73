"""Sizes that torch.compile keeps as symbols, so that one graph serves every length.

A `torch.SymInt` computes like an integer, and each comparison that Python asks it for becomes a guard of the graph.  It
cannot be hashed, though.  What is interned by its sizes (`Spec`) has the expressions of symbols for its key, and what
is chosen by price is chosen for the sizes that the compiler traces with: that needs no guard, for any choice is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def has_symbols(values: Iterable[Any]) -> bool:
    """Whether there is a symbol among some values, tuples and lists of them; `Spec`s answer for their shapes."""
    for value in values:
        kind = type(value)
        if kind is int:
            continue
        if kind is torch.SymInt or getattr(value, "example", None) is not None:
            return True
        if issubclass(kind, (tuple, list)) and has_symbols(value):
            return True
    return False


def hashable(value: Any) -> Any:
    """A value with every symbol replaced by its expression and the environment in which that is meant."""
    if type(value) is torch.SymInt:
        return value.node.expr, value.node.shape_env
    return tuple(map(hashable, value)) if isinstance(value, tuple) else value


def settled(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Sizes in which symbols that guards have made constants are integers."""
    return tuple(int(n) if type(n) is torch.SymInt and n.node.expr.is_number else n for n in sizes)


def traced_with(sizes: Sequence[Any]) -> tuple[int, ...]:
    """The sizes that the compiler traces with in place of symbols, unguarded: for choices that are right for any."""
    return tuple(n if type(n) is int else int(n.node.hint) for n in sizes)


def constant(spec: Any) -> Any:
    """A spec with constants in place of symbols: the compiler guards each of them."""
    return spec.with_(shape=tuple(map(int, spec.shape)), stride=tuple(map(int, spec.stride)))


def remembered(count: int) -> Callable[[Function], Function]:
    """Decorator: what a function gave for a `Spec` or a `Plan` is kept, for so many calls; not where it has symbols.

    Symbols hold for one graph, and would keep its compiler alive.
    """

    def decorate(function: Function) -> Function:
        cached = lru_cache(maxsize=count)(function)

        @wraps(function)
        def call(of: Any, *rest: Any) -> Any:
            return cached(of, *rest) if of.example is None else function(of, *rest)

        return cast(Function, call)

    return decorate
