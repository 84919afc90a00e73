"""Boxes of a tensor: their common part, size, overlap, coverage and grids. Integers only.

A box has one ``(start, stop)`` pair per tensor dim, stop excluded. Rows 2 and 3 of a (4, 5) tensor
are the box ``((2, 4), (0, 5))``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, product
from math import prod

Box = tuple[tuple[int, int], ...]


def box_at(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    """Return the box at `offsets` that spans `sizes`: [2, 0] and [2, 5] give ((2, 4), (0, 5))."""
    starts_and_sizes = zip(offsets, sizes, strict=True)
    return tuple((start, start + size) for start, size in starts_and_sizes)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of all elements of a tensor."""
    return tuple((0, size) for size in shape)


def spans(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive intervals: [2, 0, 3] gives [(0, 2), (2, 2), (2, 5)]."""
    return list(pairwise(accumulate(sizes, initial=0)))


def shape_of(box: Box) -> list[int]:
    """Return the sizes of a box."""
    return [stop - start for start, stop in box]


def volume(box: Box) -> int:
    """Return the number of elements of a box; 1 without dims."""
    return prod([stop - start for start, stop in box])


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes; None if it is empty."""
    common = []
    for (start, stop), (other_start, other_stop) in zip(a, b, strict=True):
        first = max(start, other_start)
        last = min(stop, other_stop)
        if first >= last:
            return None
        common.append((first, last))
    return tuple(common)


def slices_of(box: Box, local_box: Box | None = None) -> tuple[slice, ...]:
    """Return the slices of a global box in the local tensor that holds `local_box`.

    By default the slices are in the global tensor.

    Example:
        >>> slices_of(((3, 5),), ((2, 6),)), slices_of(((3, 5),))
        ((slice(1, 3, None),), (slice(3, 5, None),))
    """
    if local_box is None:
        return tuple(slice(start, stop) for start, stop in box)
    slices = []
    for (start, stop), (origin, _) in zip(box, local_box, strict=True):
        slices.append(slice(start - origin, stop - origin))
    return tuple(slices)


def format_box(box: Box) -> str:
    """Format the box as slices, for messages: ``[0:2, 3:5]``."""
    ranges = [f"{start}:{stop}" for start, stop in box]
    return f"[{', '.join(ranges)}]"


def overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the positions of two boxes that share an element, None if no two do."""
    filled = [i for i, box in enumerate(boxes) if volume(box) > 0]
    if len(filled) < 2:
        return None
    dims = range(len(boxes[filled[0]]))
    if not dims:
        return filled[0], filled[1]
    # Sweep along the dim with the most distinct starts, so that n boxes in a row cost n log n.
    starts_of = []
    for dim in dims:
        starts = {boxes[i][dim][0] for i in filled}
        starts_of.append(starts)
    sweep = max(dims, key=lambda dim: len(starts_of[dim]))
    # boxes that end after the start of the present box
    active: list[int] = []
    for i in sorted(filled, key=lambda i: boxes[i][sweep]):
        first = boxes[i][sweep][0]
        active = [j for j in active if boxes[j][sweep][1] > first]
        for j in active:
            if intersect(boxes[i], boxes[j]) is not None:
                return min(i, j), max(i, j)
        active.append(i)
    return None


def edges(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return for every dim the sorted positions at which some non-empty box begins or ends.

    0 and the size of the dim are among them. For example, rows 0:2 and 2:5 of (5, 3) give
    ((0, 2, 5), (0, 3)).
    """
    filled = [box for box in boxes if volume(box) > 0]
    positions = []
    for dim, size in enumerate(shape):
        borders = {position for box in filled for position in box[dim]}
        positions.append(tuple(sorted(borders | {0, size})))
    return tuple(positions)


def gap(boxes: Sequence[Box], shape: Sequence[int]) -> Box | None:
    """Return a box of elements in none of the disjoint boxes; None if they cover the shape."""
    # Disjoint boxes cover the shape if they have as many elements.
    if sum(map(volume, boxes)) == prod(shape):
        return None
    intervals = [pairwise(positions) for positions in edges(boxes, shape)]
    for cell in product(*intervals):
        # Example: the box of rows 0:2 leaves the cell of rows 2:5.
        if all(intersect(cell, box) is None for box in boxes):
            return cell
    return None


def grid(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """Return shard sizes per dim if the non-empty boxes are all cells of a grid, else None.

    For example, rows 0:2 and 2:5 of (5, 3) give ((2, 3), (3,)).
    """
    sizes = []
    for positions in edges(boxes, shape):
        lengths = [stop - start for start, stop in pairwise(positions)]
        sizes.append(tuple(lengths))
    # If there are as many boxes as cells, every box is one cell.
    filled = {box for box in boxes if volume(box) > 0}
    cells = prod([len(sizes_of_dim) for sizes_of_dim in sizes])
    return tuple(sizes) if len(filled) == cells else None
