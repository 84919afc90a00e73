"""The checker's state in this thread: active checker, pauses, and functions not to check."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any, Protocol

from shoal_mesh.internal import ScopedValue

from .._torch.tensors import in_backward
from .types.mesh_axes import MESH, MeshAxis


class CheckerSettings(Protocol):
    """The settings of the active checker that assertions and collectives read.

    Attributes:
        strict: whether an operand without a type is an error.
        is_local: whether every axis is local, so that S(i) counts as V.
    """

    strict: bool
    is_local: bool


CHECKER: ScopedValue[CheckerSettings | None] = ScopedValue(
    "shoal_spmd_checker", default=None, in_backward=False
)
_IS_PAUSED: ScopedValue[bool] = ScopedValue("shoal_spmd_pause", default=False, in_backward=False)
TRACES: ScopedValue[bool] = ScopedValue("shoal_spmd_trace", default=False, in_backward=False)
TRACE_LOG = logging.getLogger("shoal_spmd_types.trace")
# code of functions whose operators are not checked, however they are called
_UNCHECKED_CODE: set[CodeType] = set()


def active_checker() -> CheckerSettings | None:
    """Return the checker that checks the next operator; None if it is not checked."""
    checker = CHECKER.context_value()
    if checker is None or _IS_PAUSED.context_value() or in_backward():
        return None
    return None if _UNCHECKED_CODE and _runs_unchecked_code() else checker


def is_active() -> bool:
    """Tell whether this thread is in a block that checks types, also where it is paused."""
    return CHECKER.context_value() is not None


def is_type_checking() -> bool:
    """Tell whether operators of this thread are checked now."""
    return active_checker() is not None


def is_strict() -> bool:
    """Tell whether operators are checked now, and operands without a type are errors."""
    checker = active_checker()
    return checker is not None and checker.strict


def varying_axes() -> Callable[[MeshAxis], bool]:
    """Return a function that tells whether an axis is local now: S(i) counts as V there."""
    checker = CHECKER.context_value()
    if checker is None or checker.is_local:
        return lambda axis: True
    mesh = MESH.get()
    return lambda axis: mesh is not None and axis in mesh.local


@contextmanager
def tracing(enabled: bool) -> Iterator[None]:
    """Log operators with types inside the block, or do not."""
    with TRACES.entered(enabled):
        yield


@contextmanager
def paused() -> Iterator[None]:
    """Run a block whose operators are not checked."""
    with _IS_PAUSED.entered(True):
        yield


def leave_unchecked(function: Callable[..., Any]) -> None:
    """Leave operators unchecked while a function is running, however it is called.

    Args:
        function: a function, a method or a wrapper of one; wrappers are followed.
    """
    inner = unwrap(function)
    _UNCHECKED_CODE.add(getattr(inner, "__func__", inner).__code__)


def _runs_unchecked_code() -> bool:
    """Tell whether one of the callers is a function of `leave_unchecked`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _UNCHECKED_CODE:
            return True
        frame = frame.f_back
    return False
