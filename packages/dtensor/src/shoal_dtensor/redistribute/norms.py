"""Reducing p-norms: each part to the power of p, a sum, the root.

The powers travel as float64, so that squares of what fits the tensor's type do not overflow (torch's own norm of
float32 values from 2e19 on is infinite).  In float64 itself they overflow where the plain norm does.  The sign is kept
beside the power: a value that one rank holds alone comes back as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import RedistributeError
from ..placements import norm_order

__all__ = ["powers", "root", "wire_itemsize"]


def powers(part: Tensor, order: float) -> Tensor:
    """What is summed up.

    Raises:
        RedistributeError: if the tensor is not of real floating-point numbers.
    """
    if not part.is_floating_point():
        raise RedistributeError(f"a partial norm is of floating-point numbers, got {part.dtype}")
    wide = part.double()
    return wide * wide.abs() if order == 2 else wide.abs().pow_(order).copysign_(wide)


def root(total: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    """The norm, from the sum of the powers."""
    size = total.abs()
    return (size.sqrt_() if order == 2 else size.pow_(1 / order)).copysign_(total).to(dtype)


def wire_itemsize(op: str, dtype: torch.dtype) -> int:
    """Bytes of an element while it is reduced.

    Example:
        >>> wire_itemsize("norm2", torch.bfloat16), wire_itemsize("sum", torch.bfloat16)
        (8, 2)
    """
    return dtype.itemsize if norm_order(op) is None else torch.float64.itemsize
