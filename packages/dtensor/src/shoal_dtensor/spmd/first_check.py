"""Declarations of types that packages above load when types are first checked."""

from __future__ import annotations

from collections.abc import Callable

# Declared mutable state: the functions that wait for the first check.
_LOADERS: list[Callable[[], None]] = []


def on_first_check(load: Callable[[], None]) -> None:
    """Call a function when types are first checked, because few programs check them.

    Args:
        load: imports the declarations of a package.
    """
    _LOADERS.append(load)


def load_declarations() -> None:
    """Call the functions that wait for the first check, each once."""
    while _LOADERS:
        _LOADERS.pop()()
