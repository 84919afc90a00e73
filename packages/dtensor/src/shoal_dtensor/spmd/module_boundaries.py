"""Modules that declare the types of their inputs and outputs and are not checked inside.

While types are checked, torch's global module hooks compare the inputs of such a module, pause the
checker until the module returns, and give the outputs their types.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from .checker_state import active_checker, paused


class Boundary(Protocol):
    """The types of one module's inputs and outputs."""

    def check_inputs(self, args: tuple[Any, ...]) -> None:
        """Compare the types of positional inputs; raise SpmdTypeError if one differs."""

    def declare_outputs(self, args: tuple[Any, ...], outputs: Any) -> None:
        """Give the outputs their types; `args` are all inputs, keyword arguments last."""


class _ModuleCall(NamedTuple):
    """A running call of a module: its boundary and its pause, both None without a boundary."""

    boundary: Boundary | None = None
    pause: AbstractContextManager[None] | None = None


# functions that return the boundary of a module, or None
BOUNDARY_FINDERS: list[Callable[[nn.Module], Boundary | None]] = []


class _Calls(threading.local):
    """The calls of modules that are running on this thread."""

    def __init__(self) -> None:
        self.running: list[_ModuleCall] = []


_CALLS = _Calls()


def _check_inputs(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Check a module's inputs and pause the checker for its forward, if it has a boundary."""
    # Appended first, because `_after` also runs if this hook raises.
    _CALLS.running.append(_ModuleCall())
    if active_checker() is None:
        return
    found = [finder(module) for finder in BOUNDARY_FINDERS]
    boundary = next((declared for declared in found if declared is not None), None)
    if boundary is None:
        return
    boundary.check_inputs(args)
    pause = paused()
    pause.__enter__()
    _CALLS.running[-1] = _ModuleCall(boundary, pause)


def _type_outputs(module: nn.Module, args: tuple[Any, ...], *kwargs_and_outputs: Any) -> None:
    """Give the outputs of a call their types; after an error torch passes no keyword arguments."""
    call = _CALLS.running.pop() if _CALLS.running else _ModuleCall()
    if call.boundary is None or call.pause is None:
        return
    call.pause.__exit__(None, None, None)
    *named, outputs = kwargs_and_outputs
    if outputs is not None:
        inputs = [value for kwargs in named for value in kwargs.values()]
        call.boundary.declare_outputs((*args, *inputs), outputs)


@contextmanager
def module_boundaries() -> Iterator[None]:
    """Respect the declared types of modules inside the block."""
    if not BOUNDARY_FINDERS:
        yield
        return
    before = register_module_forward_pre_hook(_check_inputs)
    after = register_module_forward_hook(_type_outputs, with_kwargs=True, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
