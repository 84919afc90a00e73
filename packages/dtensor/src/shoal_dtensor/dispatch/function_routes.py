"""Torch functions of DTensors that a package above replaces, such as attention of a sequence.

An operator sees local tensors and layouts, but a function like attention needs its arguments as
the caller passed them. A replacement holds for all threads, until it is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._torch.tensors import disabled_torch_function, dispatch_modes
from .plain_tensors import mark_outermost

FUNCTION_ROUTES: dict[Any, Callable[..., Any]] = {}
"""Replacements by function; usually there are none, and then no call looks one up."""


def route_function(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run a torch function as `__torch_function__`, or its replacement."""
    replacement = FUNCTION_ROUTES.get(function)
    if replacement is None:
        return run_function(function, types, args, kwargs)
    return replacement(*args, **(kwargs or {}))


def run_function(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run a torch function as `__torch_function__` of DTensors, without replacements."""
    run = mark_outermost if dispatch_modes() else disabled_torch_function
    return run(function, types, args, kwargs or {})
