"""Gradients of parameters, from local computation straight into `.grad`.

On autograd's own way the gradient of a DTensor leaf becomes a DTensor, passes the hook that lays it as the leaf
lies, and is detached through dispatch: 10 us per parameter, as long as a small product itself takes.  None of
that changes a gradient that lowered computation has made.  So where autograd would do no more than accumulate,
a backward adds to the local part of `.grad` itself and returns None.  The leaf's accumulation node runs all the
same, so hooks of that node (DDP's reducer has one) are called, and find `.grad` complete.

A gradient goes autograd's way wherever it could be seen or is wanted for something else: hooks of the parameter,
`torch.autograd.grad`, parameters that are no leaves, compilation, a `.grad` that lies otherwise.  And one that
nobody asked for (`backward(inputs=...)`) is not computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal_dtensor import DTensor, Spec

from .._torch import will_run
from ..errors import SecondOrderError

is_compiling = torch.compiler.is_compiling

__all__ = ["ADD", "GIVE", "SKIP", "course", "first_order_only", "settle"]

SKIP, ADD, GIVE = range(3)
"""What becomes of a gradient: nobody wants it; it is added to `.grad`; it is given to autograd."""


def first_order_only() -> None:
    """Refuse to run a backward that itself is recorded: its local parts would not carry gradients."""
    if torch.is_grad_enabled():
        raise SecondOrderError(
            "a lowered module's backward ran with create_graph=True; second derivatives need the module's "
            "DTensor path: parallelize_module(..., lower=False)"
        )


def course(node: Any, param: Any) -> int:
    """What is to become of the gradient of a parameter in this backward pass.

    Args:
        node: where the autograd function's edge of this parameter leads (`ctx.next_functions`).
        param: the parameter that the function was called with.
    """
    if is_compiling():
        return GIVE
    try:
        if not will_run(node):
            return SKIP
    except RuntimeError:  # autograd.grad of a leaf, or an engine that does not tell
        return GIVE
    # One hook is the DTensor's own; it keeps a gradient that lies as the leaf does.
    plain = len(param._backward_hooks or ()) <= 1 and not param._post_accumulate_grad_hooks
    return ADD if plain and param.is_leaf else GIVE


def settle(how: int, param: Any, spec: Spec, local: Tensor) -> DTensor | None:
    """The gradient to return to autograd, or None after it has been added to `.grad`.

    Args:
        how: what `course` said, not `SKIP`.
        param: the parameter.
        spec: how it lay in the forward; the gradient lies the same.
        local: the local gradient, which nobody else holds.
    """
    if local.dtype is not spec.dtype:
        local = local.to(spec.dtype)
    if how == ADD and param._spec is spec:
        held = param.grad
        if held is None:
            param.grad = DTensor.__new__(DTensor, local, spec)
            return None
        if type(held) is DTensor and held._spec is spec and not held.requires_grad:
            held._local_tensor.add_(local)
            return None
    return DTensor.__new__(DTensor, local, spec)
