"""Blocks of a local tensor into one flat buffer and back: tensors and integers, no communication."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..spec import Box, Spec
from .blocks import volume

__all__ = ["adjacent_rows", "grid_of", "join", "regular", "shape_of", "slices_of", "split", "unpack"]


def slices_of(box: Box, frame: Box) -> tuple[slice, ...]:
    """Indices of a global box inside the local tensor that holds `frame`.

    Example:
        >>> slices_of(((3, 5),), ((2, 6),))
        (slice(1, 3, None),)
    """
    return tuple(slice(i - k, j - k) for (i, j), (k, _) in zip(box, frame, strict=True))


def shape_of(box: Box) -> list[int]:
    """Lengths of a box."""
    return [stop - start for start, stop in box]


def adjacent_rows(boxes: Sequence[Box], frame: Box) -> tuple[int, int] | None:
    """The local rows that blocks take up if each is whole rows of `frame` and follows the one before; else None.

    Such blocks lie in memory just as they travel, so they need not be copied.
    """
    if not boxes or not frame or any(box[1:] != frame[1:] for box in boxes):
        return None
    if any(a[0][1] != b[0][0] for a, b in pairwise(boxes)):
        return None
    return boxes[0][0][0] - frame[0][0], boxes[-1][0][1] - frame[0][0]


def unpack(out: Tensor, frame: Box, boxes: Sequence[Box], flat: Tensor) -> None:
    """Copy blocks that lie one after the other in `flat` to where they belong."""
    at = 0
    for box in boxes:
        count = volume(box)
        if count:
            out[slices_of(box, frame)] = flat[at : at + count].view(shape_of(box))
        at += count
    if not boxes and torch.compiler.is_compiling():
        # A compiler drops a collective whose result this rank does not use; here others need this rank's part of it.
        out.view(-1)[:0].copy_(flat)


def regular(boxes: Sequence[Box]) -> bool:
    """Whether all boxes have the same shape."""
    first = shape_of(boxes[0])
    return all(shape_of(box) == first for box in boxes)


def grid_of(fine: Spec, coarse: Spec, dims: Sequence[int]) -> list[int]:
    """For each of `dims`, how many pieces of the finer cut make one of the coarser."""
    return [len(fine.cut(d).sizes) // len(coarse.cut(d).sizes) for d in dims]


def join(flat: Tensor, grid: Sequence[int], block: Sequence[int], dims: Sequence[int]) -> Tensor:
    """Blocks of a regular grid over `dims`, one after the other, as one tensor with (piece, element) dim pairs."""
    order: list[int] = []
    for dim in range(len(block)):
        if dim in dims:
            order.append(list(dims).index(dim))
        order.append(len(grid) + dim)
    return flat.view(*grid, *block).permute(order)


def split(local: Tensor, grid: Sequence[int], block: Sequence[int], dims: Sequence[int]) -> Tensor:
    """The blocks of a regular grid over `dims`, one after the other in a flat tensor."""
    pairs: list[int] = []
    outer: list[int] = []
    inner: list[int] = []
    for dim, length in enumerate(block):
        if dim in dims:
            outer.append(len(pairs))
            pairs.append(grid[list(dims).index(dim)])
        inner.append(len(pairs))
        pairs.append(length)
    return local.reshape(pairs).permute(*outer, *inner).reshape(-1)
