"""Checks of leaves: that modules hold them as parameters, and that no optimizer steps too early.

Only leaves get reduced gradients.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal_dtensor.errors import LayoutError, StyleError


def check_leaf(held: Tensor, description: str) -> None:
    """Raise LayoutError if a module holds the result of an operation instead of a parameter."""
    if not held.is_leaf:
        raise LayoutError(
            f"{description} was replaced by the result of an operation, and its gradient would not "
            "be averaged: assign a parameter, or a detached tensor"
        )


def check_steps_in_backward(function: str, leaf: Any) -> None:
    """Raise StyleError if torch's `_apply_optimizer_in_backward` was called with a leaf.

    It hooks autograd's node of the leaf, which runs before gradients are reduced.
    """
    if "_in_backward_optimizers" in vars(leaf):
        raise StyleError(
            f"{function}: torch's _apply_optimizer_in_backward was called with a parameter, and "
            "its optimizer would step before gradients are reduced over ranks. Call step() after "
            "backward(); with fully_shard, the optimizer may also step in "
            "parameter.register_post_accumulate_grad_hook(...)"
        )
