"""The effect of reductions on values: neutral values, and the powers of partial norms.

The norm of order p of all ranks' values is computed in three steps: each rank computes |x|**p of
its partial norm x, the powers are summed over the ranks, and each rank computes the root of order
p.

- The powers are float64, so the square of a float32 value does not overflow. (torch's own norm of
  float32 values from 2e19 on is infinite.) For float64 values, the powers overflow for the same
  values as in torch's norm on one device.
- A power has the sign of x, and the root has the sign of the sum. If all ranks but one hold zero,
  the root is therefore x again, also if x is negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import RedistributeError
from ...layout.placements import norm_order

# Reductions whose result changes if a value occurs twice, unlike `max`. Norms change too.
_CHANGED_BY_DUPLICATES = frozenset({"sum", "product", "bxor"})


def is_counted(op: str) -> bool:
    """Tell whether a value that occurs twice changes the result of a reduction, unlike `max`."""
    return op in _CHANGED_BY_DUPLICATES or norm_order(op) is not None


def powers(part: Tensor, order: float) -> Tensor:
    """Return the powers that are summed for a norm: |x|**order with the sign of x, in float64.

    Raises:
        RedistributeError: if the tensor is not of real floating-point numbers.
    """
    if not part.is_floating_point():
        raise RedistributeError(f"a partial norm needs a floating-point dtype, got {part.dtype}")
    wide = part.double()
    size = wide.abs()
    # x * |x| has the magnitude x**2 and the sign of x, with one multiplication
    if order == 2:
        return wide * size
    return size.pow_(order).copysign_(wide)


def root(total: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    """Return the norm, given the sum of the powers: |total|**(1 / order) with the sign of it."""
    size = total.abs()
    norm = size.sqrt_() if order == 2 else size.pow_(1 / order)
    return norm.copysign_(total).to(dtype)


def identity_of(op: str, dtype: torch.dtype) -> float | int | bool:
    """Return the neutral value of a reduction."""
    order = norm_order(op)
    if order is not None:
        # The sum of the powers does not change if the power of the neutral value is 0:
        # 0**order for a positive order, inf**order for a negative one.
        return 0.0 if order > 0 else float("inf")
    if op in ("sum", "avg", "bor", "bxor"):
        return 0
    if op == "product":
        return 1
    # `min` and `band` are a logical and of bools, with the neutral value True; `max` is a logical
    # or, with False
    if dtype is torch.bool:
        return op in ("min", "band")
    if op == "band":
        return -1 if dtype.is_signed else torch.iinfo(dtype).max
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    if dtype.is_complex:
        raise RedistributeError(f"{op} is not defined for {dtype}")
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min
