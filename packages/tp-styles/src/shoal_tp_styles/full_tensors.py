"""Plain global tensors of values that may be DTensors."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from shoal_dtensor import DTensor

TensorOrNone = TypeVar("TensorOrNone", bound=Tensor | None)


def full_tensor(tensor: TensorOrNone) -> TensorOrNone | Tensor:
    """Return the global tensor of a DTensor; return a plain tensor, or None, as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
