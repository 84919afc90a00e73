"""The effect of reductions on values: neutral values, and the powers of partial norms.

The powers of a norm travel as float64, so that squares of values of the type do not overflow
(torch's own norm of float32 values from 2e19 on is infinite). In float64 itself they overflow where
the plain norm does. The sign is kept beside the power: a value that one rank holds alone comes back
as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import RedistributeError
from ...layout.placements import norm_order

# reductions that count a value as often as it occurs
_COUNTED = frozenset({"sum", "product", "bxor"})


def is_counted(op: str) -> bool:
    """Tell whether a reduction counts a value as often as it occurs, unlike `max`."""
    return op in _COUNTED or norm_order(op) is not None


def powers(part: Tensor, order: float) -> Tensor:
    """Return the powers that are summed for a norm.

    Raise RedistributeError if the tensor is not of real floating-point numbers.
    """
    if not part.is_floating_point():
        raise RedistributeError(f"a partial norm needs a floating-point dtype, got {part.dtype}")
    wide = part.double()
    size = wide.abs()
    if order == 2:
        return wide * size
    return size.pow_(order).copysign_(wide)


def root(total: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    """Return the norm, given the sum of the powers."""
    size = total.abs()
    norm = size.sqrt_() if order == 2 else size.pow_(1 / order)
    return norm.copysign_(total).to(dtype)


def identity_of(op: str, dtype: torch.dtype) -> float | int | bool:
    """Return the neutral value of a reduction."""
    order = norm_order(op)
    if order is not None:
        return 0.0 if order > 0 else float("inf")
    if op in ("sum", "avg", "bor", "bxor"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op in ("min", "band")
    if op == "band":
        return -1 if dtype.is_signed else torch.iinfo(dtype).max
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    if dtype.is_complex:
        raise RedistributeError(f"{op} is not defined for {dtype}")
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min
