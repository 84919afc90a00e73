"""Checks of leaves: that modules hold them as parameters, and that they have been initialized.

Only leaves get reduced gradients.
"""

from __future__ import annotations

from torch import Tensor, nn

from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import FakeTensor, local_of


def check_leaf(held: Tensor, description: str) -> None:
    """Raise LayoutError if a module holds the result of an operation instead of a parameter."""
    if not held.is_leaf:
        raise LayoutError(
            f"{description} was replaced by the result of an operation, and its gradient would not "
            "be averaged: assign a parameter, or a detached tensor"
        )


def has_no_values(leaf: nn.Parameter) -> bool:
    """Return whether a leaf has NaN in all elements: `to_empty()` fills memory with NaN."""
    local = local_of(leaf).detach()
    if isinstance(local, FakeTensor) or not local.numel():
        return False
    return bool(local.isnan().all())
