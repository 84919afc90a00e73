"""The order in memory of a local tensor's dims: that of the global stride."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...layout.tensor_meta import contiguous_stride

if TYPE_CHECKING:
    from ...layout.spec import Spec


def memory_order(spec: Spec) -> list[int] | None:
    """Tensor dims from the largest stride to the smallest; None if that is row-major."""
    if spec.stride == contiguous_stride(spec.shape):
        return None
    if any(n > 1 and step == 0 for n, step in zip(spec.shape, spec.stride, strict=True)):
        return None  # an expanded tensor: its shards are plain
    order = sorted(range(spec.ndim), key=lambda dim: -spec.stride[dim])
    significant = [dim for dim in order if spec.shape[dim] > 1]
    return None if significant == sorted(significant) else order


def in_memory_order(spec: Spec) -> Callable[[Tensor], Tensor]:
    """A function that gives a local tensor the memory order of the global stride; it copies only where they differ."""
    order = memory_order(spec)
    if order is None:
        return torch.Tensor.contiguous
    back = sorted(range(spec.ndim), key=order.__getitem__)
    return lambda local: local.permute(order).contiguous().permute(back)
