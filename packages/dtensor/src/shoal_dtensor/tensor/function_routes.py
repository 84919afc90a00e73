"""Torch functions of DTensors that a package above replaces, such as attention of a sequence.

An operator sees local tensors and layouts, but a function like attention needs its arguments as
the caller passed them. A replacement holds for all threads, until it is removed. While there are
none, functions of DTensors cost what they cost without this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch.dispatch import MarkWhileWatched, torch_function_of
from .dtensor import DTensor

_REPLACEMENTS: dict[Any, Callable[..., Any]] = {}


def replace_function(function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Have DTensors run a replacement with the arguments of a torch function, in its place."""
    _REPLACEMENTS[function] = replacement
    DTensor.__torch_function__ = staticmethod(_run_replaced)


def restore_function(function: Callable[..., Any]) -> None:
    """Undo `replace_function`, if it was called."""
    _REPLACEMENTS.pop(function, None)
    if not _REPLACEMENTS:
        DTensor.__torch_function__ = MarkWhileWatched()


def run_function(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run a torch function as `__torch_function__` of DTensors, without replacements."""
    return torch_function_of(None)(function, types, args, kwargs or {})


def _run_replaced(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run a torch function, or its replacement; `__torch_function__` while there are some."""
    replacement = _REPLACEMENTS.get(function)
    if replacement is None:
        return run_function(function, types, args, kwargs)
    return replacement(*args, **(kwargs or {}))
