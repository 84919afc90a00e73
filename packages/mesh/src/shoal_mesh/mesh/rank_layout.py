"""Which rank is at which coordinate of a grid: its shape, and its ranks in row-major order.

Ranks with one step between them, as those of most meshes and of their lines, are a range: a mesh over 16,384 ranks
takes as much memory as one over four. Nothing here depends on torch, processes or names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

from ..argument_types import kind_of
from ..errors import MeshError, MeshTypeError

if TYPE_CHECKING:
    from ..groups.process_groups import BackendChoice, Comm


def read_sizes(values: Iterable[int], name: str) -> tuple[int, ...]:
    """Integers in an order, as a tuple; MeshTypeError for anything else."""
    if not isinstance(values, str | bytes | Set | Mapping):
        with suppress(TypeError, RuntimeError):  # RuntimeError: torch's own mesh
            return tuple(map(index, values))
    raise MeshTypeError(f"{name} is a sequence of int, got {kind_of(values)}")


@dataclass(frozen=True)
class Layout:
    """A grid of distinct ranks; made by `of` and `dense`, so that equal grids are equal."""

    shape: tuple[int, ...]
    ranks: Sequence[int]  # row-major: a range if they have one step, else a tuple

    @classmethod
    def of(cls, shape: Sequence[int], ranks: Sequence[int]) -> Layout:
        """The grid of any distinct ranks in row-major order."""
        first, step = ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1
        line = range(first, first + step * len(ranks), step)  # 1 3 5 7: range(1, 9, 2)
        return cls(tuple(shape), line if all(map(int.__eq__, line, ranks)) else tuple(ranks))

    def __setstate__(self, state: Any) -> None:
        """Files written before hold (size, step) pairs of each axis, an offset, and perhaps a list of all ranks."""
        if "axes" in state:
            axes, offset, listed = state["axes"], state["offset"], state["listed"]
            pairs = [pair for axis in axes for pair in axis]  # (2, 3) with steps 3 and 1: 0 1 2 3 4 5
            places = [offset + sum(each) for each in product(*(range(0, n * step, step) for n, step in pairs))]
            shape = [prod(n for n, _ in axis) for axis in axes]
            state = vars(Layout.of(shape, places if listed is None else [listed[place] for place in places]))
        vars(self).update(state)

    @classmethod
    def dense(cls, shape: Sequence[int]) -> Layout:
        """The grid of the ranks from 0 on."""
        return cls(tuple(shape), range(prod(shape)))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @cached_property
    def _steps(self) -> tuple[int, ...]:
        """Along each axis from one position to the next."""
        return tuple(prod(self.shape[axis + 1 :]) for axis in range(self.ndim))  # (2, 3, 4): 12, 4, 1

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate."""
        return self.ranks[sum(map(int.__mul__, coordinate, self._steps))]  # (1, 2, 3) of (2, 3, 4): 12 + 8 + 3

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of a rank; None when there is none."""
        if rank not in self.ranks:
            return None
        position = self.ranks.index(rank)
        return tuple(position // step % size for step, size in zip(self._steps, self.shape, strict=True))

    def select(self, axes: Sequence[int], at: Sequence[int]) -> Layout:
        """The grid over some axes in the order asked for, through a coordinate."""
        positions = [sum(at[axis] * step for axis, step in enumerate(self._steps) if axis not in axes)]
        for axis in axes:  # (2, 3, 4), axes 2 and 0 at 1 of axis 1: 4, then 4 5 6 7, then 4 16, 5 17, 6 18, 7 19
            steps = range(0, self.shape[axis] * self._steps[axis], self._steps[axis])
            positions = [position + step for position in positions for step in steps]
        return Layout.of([self.shape[axis] for axis in axes], [self.ranks[position] for position in positions])

    def flatten(self) -> Layout:
        """The grid with all axes merged into one, row-major."""
        return Layout((len(self.ranks),), self.ranks)

    def unflatten(self, axis: int, sizes: Sequence[int]) -> Layout:
        """The grid with one axis split row-major into several; MeshError if their product is not its size."""
        if prod(sizes) != self.shape[axis] or any(size < 1 for size in sizes):
            raise MeshError(f"axis {axis} of shape {self.shape} has {self.shape[axis]} ranks: not {tuple(sizes)}")
        return Layout((*self.shape[:axis], *sizes, *self.shape[axis + 1 :]), self.ranks)

    # --- parts of a larger grid: positions are those of their ranks in it --------------------------------------------

    def crossed(self, parts: Sequence[Layout]) -> Layout | None:
        """The grid over the axes of several parts of this one through one rank; None if they share more, or none.

        Parts with ranks 4 5 6 7 and 1 5 of a 2 x 4 grid cross at 5: from there 4 is one step back, and 1 four steps.
        """
        lines = [[self.ranks.index(rank) for rank in part.ranks] for part in parts]
        own = next(iter(set(lines[0]).intersection(*lines[1:])), None)
        if own is None:
            return None
        positions = [sum(each) - own * (len(lines) - 1) for each in product(*lines)]  # 4 + 1 - 5 = 0, 4 + 5 - 5 = 4
        if len(set(positions)) < len(positions) or max(positions) >= len(self.ranks):
            return None
        return Layout.of([size for part in parts for size in part.shape], [self.ranks[p] for p in positions])

    def is_crossed_by_axes(self, part: Layout) -> bool:
        """Whether a part of this grid is what its axes through one rank span."""
        return self.crossed([part.select((axis,), (0,) * part.ndim) for axis in range(part.ndim)]) == part

    def parallel(self, part: Layout, rank: int) -> Layout:
        """The part with the same steps through another rank: of ranks 4-7 of a 2 x 4 grid, through 1, ranks 0-3."""
        positions = [self.ranks.index(each) for each in part.ranks]
        first, start = min(positions), self.ranks.index(rank)
        offsets = [position - first for position in sorted(positions)]
        # 4-7 and 16-19 of a 2 x 3 x 4 grid: 0 1 2 3 12 13 14 15, a run of 4 by 1, which leaves 0 12, a run of 2 by 12.
        while len(offsets) > 1:
            step = offsets[1]
            size = next((i for i, offset in enumerate(offsets) if offset != i * step), len(offsets))
            start -= start // step % size * step  # through 21: 21 - 1 = 20, then 20 - 12 = 8
            offsets = offsets[::size]
        return Layout.of(part.shape, [self.ranks[position - first + start] for position in positions])


@dataclass(frozen=True, slots=True)
class MeshFields:
    """The fields of a mesh as checked values, which is also what is pickled."""

    device_type: str  # without an index
    layout: Layout  # coordinate -> rank
    names: tuple[str, ...] | None  # of the axes, or None
    choices: tuple[BackendChoice, ...]  # backend of every axis
    abstract_rank: int | None = None  # the rank whose view an abstract mesh is, None for a mesh with process groups
    # what gives an abstract mesh its communicators, None if it has none
    connect: Callable[[tuple[int, ...]], Comm] | None = None
