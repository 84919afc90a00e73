"""`CellIndex`: the cells of a tensor, boxes that each rank holds whole or not at all.

Boxes of different ranks may overlap in part; they are divided at each other's edges. `CellIndex`
finds the cells that a region meets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from shoal_dtensor.internal import Box, edges, grid, overlap

from ..manifest.records import Holding
from ..mapping.regions import Region


class Cell(NamedTuple):
    """A box of a tensor, and all holdings that contain it."""

    box: Box
    holders: tuple[Holding, ...]


class CellIndex:
    """The cells of a tensor, found by a region.

    Args:
        shape: shape of the tensor.
        holdings: the holdings of all ranks, none of them empty.

    Example:
        >>> rows = [Holding(0, ((0, 2),), 0, (1,)), Holding(1, ((2, 4),), 0, (1,))]
        >>> cells = CellIndex((4,), [*rows, Holding(2, ((0, 2),), 0, (1,))])
        >>> [(cell.box, len(cell.holders)) for cell in cells.meeting((range(1, 4),))]
        [(((0, 2),), 2), (((2, 4),), 1)]
    """

    def __init__(self, shape: Sequence[int], holdings: Sequence[Holding]) -> None:
        by_box = dict[Box, list[Holding]]()
        for holding in holdings:
            by_box.setdefault(holding.box, []).append(holding)
        boxes = [*by_box]
        if overlap(boxes) is not None:
            by_box = _split_at_edges(shape, by_box)
            boxes = [*by_box]
        self.all = [Cell(box, tuple(holders)) for box, holders in by_box.items()]
        self._edges = edges(boxes, shape)
        # If the cells form a grid, a cell is found by the first index of each dim.
        self._by_start: dict[tuple[int, ...], Cell] | None = None
        if grid(boxes, shape) is not None:
            self._by_start = {}
            for cell in self.all:
                starts = tuple(start for start, _ in cell.box)
                self._by_start[starts] = cell

    def meeting(self, region: Region) -> Iterator[Cell]:
        """Yield the cells whose box meets the hull of a region that is not empty."""
        if self._by_start is None:
            for cell in self.all:
                if _meets(cell.box, region):
                    yield cell
            return
        starts = []
        for positions, indices in zip(self._edges, region, strict=True):
            first = bisect_right(positions, indices[0]) - 1
            stop = bisect_left(positions, indices[-1] + 1)
            starts.append(positions[first:stop])
        for start in product(*starts):
            yield self._by_start[start]


def _meets(box: Box, region: Region) -> bool:
    for (start, stop), indices in zip(box, region, strict=True):
        if indices[0] >= stop or indices[-1] < start:
            return False
    return True


def _split_at_edges(
    shape: Sequence[int], by_box: dict[Box, list[Holding]]
) -> dict[Box, list[Holding]]:
    """Split boxes that share elements at the edges of all boxes."""
    positions = edges([*by_box], shape)
    by_cell = dict[Box, list[Holding]]()
    for box, holdings in by_box.items():
        intervals_of_dims = []
        for (start, stop), edges_of_dim in zip(box, positions, strict=True):
            first = bisect_left(edges_of_dim, start)
            last = bisect_left(edges_of_dim, stop)
            intervals_of_dims.append([*pairwise(edges_of_dim[first : last + 1])])
        for cell in product(*intervals_of_dims):
            by_cell.setdefault(cell, []).extend(holdings)
    return by_cell
