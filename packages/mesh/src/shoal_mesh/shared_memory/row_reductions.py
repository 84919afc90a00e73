"""Reductions of the rows that ranks show in shared memory, in the order of ranks on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

HALF_TYPES = frozenset({torch.float16, torch.bfloat16})
# The number of elements, of all rows together, that an average converts to float32 at a time: 1 MiB
# stays in the cache.
_WIDE_ELEMENTS = 1 << 18

# Reductions of two rows, and along a dim.
_REDUCE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "sum": (torch.add, torch.sum),
    "min": (torch.minimum, torch.amin),
    "max": (torch.maximum, torch.amax),
    "product": (torch.mul, torch.prod),
}


def reduce_rows(rows: Tensor, op: str, out: Tensor) -> None:
    """Reduce rows, (size, k) -> (k,); other ranks may read the rows at the same time."""
    if op == "avg" and rows.dtype in HALF_TYPES:
        _average_half_types(rows, out)
        return
    if op == "avg":
        reduce_rows(rows, "sum", out)
        out.div_(rows.shape[0])
        return
    reduce_two, reduce_along_dim = _REDUCE[op]
    # for two rows of 1 MiB, 40 us; a reduction along a dim takes 110 us
    if rows.shape[0] == 2:
        reduce_two(rows[0], rows[1], out=out)
    else:
        reduce_along_dim(rows, 0, out=out)


def _average_half_types(rows: Tensor, out: Tensor) -> None:
    """Average rows of a half type in float32, (size, k) -> (k,).

    In the half type the sum may leave the range although the mean is within it.
    """
    size, length = rows.shape
    step = max(1, _WIDE_ELEMENTS // size)
    for start in range(0, length, step):
        stop = min(start + step, length)
        wide = rows[:, start:stop].to(torch.float32)
        # The terms are divided before the sum: bfloat16 has the range of float32, so the sum could
        # overflow. Small terms keep their digits in float32.
        mean = wide.mul_(1 / size).sum(0)
        elements_between(out, start, stop).copy_(mean)


def elements_between(flat: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements from `start` to `stop`.

    A slice takes a microsecond, so all elements are returned unsliced.
    """
    return flat if stop - start == flat.numel() else flat[start:stop]


def flat_of(tensor: Tensor) -> Tensor:
    """Return all elements in one dim.

    A view takes a microsecond, so a 1-D tensor is returned as it is.
    """
    return tensor if tensor.ndim == 1 else tensor.view(-1)
