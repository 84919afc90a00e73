"""What becomes of the gradient of a parameter that a local computation has: unused, added to `.grad`, or returned."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .._torch import is_compiling, will_run
from ..errors import SecondOrderError

# What becomes of the gradient of a parameter: not computed, added to `.grad`, or returned to autograd.
GradRoute = Literal["unused", "accumulate", "return"]


def first_order_only() -> None:
    """Refuse to run a backward that itself is recorded: its local shards would not carry gradients.

    Raises:
        SecondOrderError: under `create_graph=True`.
    """
    if torch.is_grad_enabled():
        raise SecondOrderError(
            "a lowered module's backward ran with create_graph=True; second derivatives need the module's "
            "DTensor path: parallelize_module(..., lower=False)"
        )


def grad_route(node: Any, param: Any) -> GradRoute:
    """What becomes of the gradient of a parameter in this backward pass.

    Args:
        node: where the autograd function's edge of this parameter leads (`ctx.next_functions`).
        param: the parameter that the function was called with.
    """
    route: GradRoute = "return" if is_compiling() else leaf_route(node)
    return "return" if route == "accumulate" and (not param.is_leaf or grad_hooked(param)) else route


def leaf_route(node: Any) -> GradRoute:
    """What autograd does in this backward pass with the gradient of a leaf, whose node this is."""
    try:
        return "accumulate" if will_run(node) else "unused"
    except RuntimeError:  # autograd.grad of a leaf, or an engine that cannot answer
        return "return"


def grad_hooked(param: Any) -> bool:
    """Whether users' hooks see the gradient of a parameter."""
    # One hook is the DTensor's own; it changes nothing about a gradient with the leaf's spec.
    return len(param._backward_hooks or ()) > 1 or bool(param._post_accumulate_grad_hooks)
