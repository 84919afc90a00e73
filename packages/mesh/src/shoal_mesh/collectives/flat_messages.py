"""Flat messages of many tensors: which tensors one message has, and where each tensor is in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def positions_by_dtype(dtypes: Sequence[torch.dtype | None]) -> list[list[int]]:
    """Return a list of positions for each dtype; the tensors of a list fit one message.

    Args:
        dtypes: the dtype of each tensor; None for a tensor that is in no message.

    Example:
        >>> positions_by_dtype([torch.float32, torch.int64, None, torch.float32])
        [[0, 3], [1]]
    """
    positions: dict[torch.dtype, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        if dtype is not None:
            positions.setdefault(dtype, []).append(i)
    return [*positions.values()]


def parts_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat message, one after another, with the shapes of the tensors in it.

    Example:
        >>> parts_like(torch.arange(5), [torch.empty(1, 2), torch.empty(3)])
        [tensor([[0, 1]]), tensor([2, 3, 4])]
    """
    counts = [tensor.numel() for tensor in tensors]
    parts = torch.split(flat, counts)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
