"""Scopes of ours that a function was in when `torch.utils.checkpoint` ran it hold too when backward runs it again.

Backward may run it after the block that entered the scope, and outside of the module whose forward did.  Both kinds of
checkpoint keep the function in an object of theirs, which the frames of their first run refer to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager, ExitStack
from inspect import unwrap
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointFunction, checkpoint

Enter = Callable[[], AbstractContextManager[object]]

_REENTRANT, _OTHER = CheckpointFunction.forward.__code__, unwrap(checkpoint).__code__


class _InScopes(NamedTuple):
    """A function that runs in scopes."""

    function: Callable[..., Any]
    scopes: dict[Hashable, Enter]

    def __call__(self, *args: Any) -> Any:
        with ExitStack() as stack:
            for enter in self.scopes.values():
                stack.enter_context(enter())
            return self.function(*args)


def checkpoints() -> list[Any]:
    """The checkpoints that run a function for the first time now, the innermost first; none while compiling."""
    if torch.compiler.is_compiling():
        return []
    found: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            found.append(frame.f_locals["ctx"])
        elif frame.f_code is _OTHER and "gen" in frame.f_locals:
            kept = frame.f_locals["gen"].gi_frame.f_locals.get("new_frame")
            found += [] if kept is None else [kept]  # without gradients it keeps none
        frame = frame.f_back
    return found


def recomputed_in(scope: Hashable, enter: Enter, outside: Collection[object]) -> None:
    """Have the functions that checkpoints run now run in a scope when backward runs them again.

    Args:
        scope: what is the same for the same scope.
        enter: enters it.
        outside: the checkpoints in which it was entered, which will enter it themselves.
    """
    for kept in checkpoints():
        if any(kept is other for other in outside):
            continue
        name = "run_function" if hasattr(kept, "run_function") else "recompute_fn"
        function = getattr(kept, name)
        if not isinstance(function, _InScopes):
            function = _InScopes(function, {})
            setattr(kept, name, function)
        function.scopes.setdefault(scope, enter)
