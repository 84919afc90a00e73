"""Regions of a tensor: one arithmetic progression of indices per dim.  Integers only.

A box is a region whose steps are 1. Every other column of rows 2 and 3 of a (4, 6) tensor is the
region ``(range(2, 4), range(0, 6, 2))``. Regions are closed under intersection, so mappings compose
exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, prod

from shoal_dtensor.internal import Box

Region = tuple[range, ...]
"""One non-negative progression per tensor dim, with a positive step."""


def region_of_box(box: Box) -> Region:
    """Return a box as a region: ((2, 4), (0, 5)) gives (range(2, 4), range(0, 5))."""
    return tuple(range(start, stop) for start, stop in box)


def whole_region(shape: Sequence[int]) -> Region:
    """Return the region of all elements of a tensor."""
    return tuple(range(size) for size in shape)


def count_elements(region: Region) -> int:
    """Return the number of elements of a region; 1 without dims."""
    return prod(map(len, region))


def format_region(region: Region) -> str:
    """Format the region as slices, for messages: ``[2:4, 0:6:2]``."""
    texts = []
    for indices in region:
        text = f"{indices.start}:{indices.stop}"
        texts.append(text if indices.step == 1 else f"{text}:{indices.step}")
    return "[" + ", ".join(texts) + "]"


def common_positions(one: range, other: range) -> tuple[range, range]:
    """Return the positions in `one` and in `other` of the indices that they share.

    Both results have the same length, 0 if the progressions share no index.

    Example:
        >>> one, other = range(0, 20, 2), range(3, 20, 3)
        >>> positions, other_positions = common_positions(one, other)
        >>> list(positions), list(other_positions)  # the shared indices are 6, 12 and 18
        ([3, 6, 9], [1, 3, 5])
    """
    no_positions = (range(0), range(0))
    if not one or not other:
        return no_positions
    divisor = gcd(one.step, other.step)
    distance = other.start - one.start
    if distance % divisor:
        return no_positions
    # The index at position i of `one` is in `other`, extended to both sides, if
    # i * one.step == distance, modulo other.step. The two steps and the distance are divided by
    # `divisor`. Then one.step has an inverse, by which the smallest i >= 0 is found. If the modulus
    # is 1, every i fits, and 0 is the smallest.
    # Example: 2 i == 3 modulo 3 for the steps 2 and 3. 2 is its own inverse, so i is 3 * 2 % 3 = 0.
    modulus = other.step // divisor
    inverse = pow(one.step // divisor, -1, modulus) if modulus > 1 else 0
    first_position = (distance // divisor) * inverse % modulus
    first = one.start + one.step * first_position
    # the least common multiple of the two steps
    step = one.step * modulus
    lowest = max(one.start, other.start)
    if first < lowest:
        # Rounded up: with first 0, lowest 3 and step 6, one step leads to 6.
        missing_steps = -((first - lowest) // step)
        first += missing_steps * step
    stop = min(one[-1], other[-1]) + 1
    count = len(range(first, stop, step))
    if not count:
        return no_positions
    return (
        _positions(one, first, step, count),
        _positions(other, first, step, count),
    )


def _positions(indices: range, first: int, step: int, count: int) -> range:
    """Return the positions of `count` indices from `first` on in a progression."""
    start = (first - indices.start) // indices.step
    stride = step // indices.step
    return range(start, start + (count - 1) * stride + 1, stride)


def take(indices: range, positions: range) -> range:
    """Return the indices at some positions of a progression; `positions` may be empty.

    The result stops right after its last index, and a single index has step 1. So equal sets of
    indices have the same text.
    """
    if not positions:
        return range(0)
    first = indices[positions[0]]
    last = indices[positions[-1]]
    step = indices.step * positions.step if len(positions) > 1 else 1
    return range(first, last + 1, step)


def intersect_regions(one: Region, other: Region) -> Region | None:
    """Return the common part of two regions; None if it is empty.

    Example:
        >>> intersect_regions((range(0, 12, 2),), (range(3, 9),))
        (range(4, 9, 2),)
    """
    common = []
    for indices, others in zip(one, other, strict=True):
        positions, _ = common_positions(indices, others)
        if not positions:
            return None
        common.append(take(indices, positions))
    return tuple(common)


def contains(outer: Region, inner: Region) -> bool:
    """Return whether every element of `inner` is in `outer`."""
    return not count_elements(inner) or intersect_regions(outer, inner) == inner


def first_overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Return the positions of two regions that share an element, None if no two do."""
    filled = [i for i, region in enumerate(regions) if count_elements(region)]
    if len(filled) < 2:
        return None
    dims = range(len(regions[filled[0]]))
    if not dims:
        return filled[0], filled[1]
    # A sweep along the dim with most distinct starts keeps the list of open regions short.
    start_counts = []
    for dim in dims:
        distinct_starts = {regions[i][dim].start for i in filled}
        start_counts.append(len(distinct_starts))
    sweep_dim = start_counts.index(max(start_counts))
    active: list[int] = []
    for i in sorted(filled, key=lambda i: regions[i][sweep_dim].start):
        start = regions[i][sweep_dim].start
        active = [j for j in active if regions[j][sweep_dim][-1] >= start]
        for j in active:
            if intersect_regions(regions[i], regions[j]) is not None:
                return min(i, j), max(i, j)
        active.append(i)
    return None


def first_gap(regions: Sequence[Region], shape: Sequence[int]) -> Region | None:
    """Return a region of elements in none of the regions; None if they cover the shape.

    The regions may share elements.

    Example:
        >>> first_gap([(range(0, 4, 2), range(3))], (4, 3))
        (range(1, 2), range(0, 3))
    """
    if not prod(shape):
        return None
    filled = [region for region in regions if count_elements(region)]
    return _find_gap(filled, tuple(shape))


def _find_gap(regions: Sequence[Region], shape: tuple[int, ...]) -> Region | None:
    """Find a gap dim by dim: the regions that contain an index must cover the following dims."""
    if not shape:
        # One element is left. It is covered by any region; otherwise () is the gap without dims.
        return None if regions else ()
    size, *rest = shape
    # the regions, without this dim, that contain an index -> their gap in the following dims
    gaps: dict[frozenset[Region], Region | None] = {}
    for indices in _cells([region[0] for region in regions], size):
        active = frozenset(region[1:] for region in regions if indices.start in region[0])
        if active not in gaps:
            gaps[active] = _find_gap([*active], tuple(rest))
        gap = gaps[active]
        if gap is not None:
            return (indices, *gap)
    return None


def _cells(along: Sequence[range], size: int) -> list[range]:
    """Split a dim into intervals whose indices are in the same progressions."""
    edges = {0, size}
    for indices in along:
        if indices.step == 1 or len(indices) == 1:
            edges |= {indices[0], indices[-1] + 1}
        else:
            edges |= {edge for index in indices for edge in (index, index + 1)}
    ordered = sorted(edges)
    return [range(start, stop) for start, stop in pairwise(ordered)]
