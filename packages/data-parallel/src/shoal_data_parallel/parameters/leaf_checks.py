"""A check that modules hold leaves as parameters, because only leaves get reduced gradients."""

from __future__ import annotations

from torch import Tensor

from shoal_dtensor.errors import LayoutError


def check_leaf(held: Tensor, description: str) -> None:
    """Raise LayoutError if a module holds the result of an operation instead of a parameter."""
    if not held.is_leaf:
        raise LayoutError(
            f"{description} was replaced by the result of an operation, and its gradient would not be "
            "averaged: assign a parameter, or a detached tensor"
        )
