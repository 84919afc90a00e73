"""Functions of the checker for code that runs with and without it, and loads it only if it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .._torch.tensors import types_are_checked

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


@contextmanager
def types_unchecked() -> Iterator[None]:
    """Run a block whose operators are not checked: a library's own code on local tensors."""
    if not types_are_checked():
        yield
        return
    from .checker_state import paused

    with paused():
        yield


def copy_type(source: Any, target: Any) -> None:
    """Give a tensor the type of another one, if it has one."""
    if not types_are_checked():
        return
    from .types.tensor_types import set_type, type_of

    present = type_of(source)
    if present is not None:
        set_type(target, present)
