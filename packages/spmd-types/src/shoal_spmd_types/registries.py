"""Registries: declarations about autograd functions and hooks that a program defines.

May import: nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from shoal_dtensor.errors import ArgumentTypeError
from shoal_dtensor.internal import spmd

F = TypeVar("F", bound=Callable[..., Any])


def register_autograd_function(cls: type) -> type:
    """Register an autograd function that declares its types in `spmd_typecheck`.

    The registration only checks that there is a declaration. The checker finds the static method
    without it.

    Args:
        cls: the class, with a static method `spmd_typecheck` (or `typecheck_forward`, which is
            called in place of `apply`).

    Returns:
        `cls`.

    Raises:
        ArgumentTypeError: if the class has neither method.

    Example:
        >>> @register_autograd_function
        ... class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def spmd_typecheck(outputs, *, x):
        ...         assert_type_like(outputs, x)
    """
    if not hasattr(cls, "spmd_typecheck") and not hasattr(cls, "typecheck_forward"):
        raise ArgumentTypeError(
            f"register_autograd_function: {cls.__name__} must declare its types in a static "
            "method spmd_typecheck"
        )
    return cls


def register_local_autograd_function(cls: type) -> type:
    """Register an autograd function that each rank computes on its own, without collectives.

    The results are V for operands of types R and V, R if all operands are R, and I if all are I. P
    and other combinations are errors.

    Args:
        cls: the class.

    Returns:
        `cls`.

    Example:
        >>> @register_local_autograd_function
        ... class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
    """
    spmd.LOCAL_FUNCTIONS.add(cls)
    return cls


_BACKWARD_HOOKS: set[Callable[..., Any]] = set()


def register_local_backward_hook(fn: F) -> F:
    """Declare that a backward hook sends nothing and does not change the type of a gradient.

    Operators of a backward pass are not checked, so the declaration only informs readers.

    Args:
        fn: the hook.

    Returns:
        `fn`.

    Example:
        >>> @register_local_backward_hook
        ... def count(grad):
        ...     return grad
    """
    _BACKWARD_HOOKS.add(fn)
    return fn


def register_decomposition(cls: type, ref_impl: Callable[..., Any] | None = None) -> Any:
    """Register a reference implementation in torch's operators for an autograd function.

    While types are checked, the reference runs in addition to the function, and its types become
    the types of the function's results.

    Args:
        cls: the class of the function.
        ref_impl: a function with the arguments of `cls.apply`; without it, the result is a
            decorator.

    Returns:
        `ref_impl`, or the decorator.

    Example:
        >>> class Fused(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return x.exp() * x
        >>> @register_decomposition(Fused)
        ... def reference(x):
        ...     return x.exp() * x
    """
    if ref_impl is None:
        return functools.partial(register_decomposition, cls)
    spmd.DECOMPOSITIONS[cls] = ref_impl
    return ref_impl
