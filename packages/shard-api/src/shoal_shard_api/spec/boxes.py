"""Index ranges of shards as boxes: overlap, coverage, grids.  Integers only.

A box is one ``(start, stop)`` pair per tensor dim, as in ``Spec.box`` of shoal_dtensor.  The shard of rows 2 and 3 of a
(4, 5) tensor has the box ``((2, 4), (0, 5))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

Box = tuple[tuple[int, int], ...]


def box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    """The box that starts at ``offsets`` and spans ``sizes`` elements along each dim.

    Example:
        >>> box([2, 0], [2, 5])
        ((2, 4), (0, 5))
    """
    return tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))


def volume(of: Box) -> int:
    """Number of elements in the box (1 for a 0-dim tensor)."""
    return prod(stop - start for start, stop in of)


def intersection(a: Box, b: Box) -> Box | None:
    """The box of the elements that are in both boxes, None if there is none.

    Example:
        >>> intersection(((0, 4), (0, 4)), ((2, 6), (1, 3)))
        ((2, 4), (1, 3))
    """
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Index that selects ``inner`` from a tensor whose elements are exactly those of ``outer``.

    Example:
        >>> relative(((2, 4),), ((1, 6),))
        (slice(1, 3, None),)
    """
    return tuple(slice(i[0] - o[0], i[1] - o[0]) for i, o in zip(inner, outer, strict=True))


def format_box(of: Box) -> str:
    """The box as slices, for messages: ``[0:2, 3:5]``."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in of) + "]"


def overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Positions of two boxes that share an element, None if no two do.

    A sweep along the dim with most distinct starts.  ``active`` are the boxes that reach beyond the present start, so n
    boxes in a row cost n log n.  Boxes that all begin together cost all pairs.
    """
    filled = [i for i, each in enumerate(boxes) if volume(each) > 0]
    if len(filled) < 2:
        return None
    dims = range(len(boxes[filled[0]]))
    if not dims:
        return filled[0], filled[1]
    sweep = max(dims, key=lambda dim: len({boxes[i][dim][0] for i in filled}))
    active: list[int] = []
    for i in sorted(filled, key=lambda i: boxes[i][sweep]):
        active = [j for j in active if boxes[j][sweep][1] > boxes[i][sweep][0]]
        for j in active:
            if intersection(boxes[i], boxes[j]) is not None:
                return min(i, j), max(i, j)
        active.append(i)
    return None


def edges(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For every dim, the sorted positions at which some non-empty box begins or ends, with 0 and the dim's size."""
    filled = [each for each in boxes if volume(each) > 0]
    return tuple(
        tuple(sorted({0, size} | {position for each in filled for position in each[dim]}))
        for dim, size in enumerate(shape)
    )


def gap(boxes: Sequence[Box], shape: Sequence[int]) -> Box | None:
    """A box of elements that are in none of the boxes, None if the boxes cover the shape.

    Args:
        boxes: Boxes inside the shape that do not overlap: so they cover it exactly if their volumes add up to its size.
        shape: Size of the tensor.
    """
    if sum(volume(each) for each in boxes) == prod(shape):
        return None
    for cell in product(*(list(pairwise(positions)) for positions in edges(boxes, shape))):
        if all(intersection(cell, each) is None for each in boxes):
            return cell
    return None


def grid(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """Shard sizes along every dim if the non-empty boxes are exactly all cells of a grid, else None.

    Example:
        >>> grid([((0, 2), (0, 3)), ((2, 5), (0, 3))], (5, 3))
        ((2, 3), (3,))
    """
    sizes = tuple(tuple(stop - start for start, stop in pairwise(positions)) for positions in edges(boxes, shape))
    # No box reaches over an edge of the grid if there are as many boxes as cells: 2 x 3 edges have 6 cells.
    filled = {each for each in boxes if volume(each) > 0}
    return sizes if len(filled) == prod(len(each) for each in sizes) else None
