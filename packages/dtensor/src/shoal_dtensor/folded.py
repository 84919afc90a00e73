"""How a tensor dim is cut that was several dims before a reshape: integers only.

`(batch, sequence) -> (batch * sequence)` with the sequence cut leaves every rank one run of elements per batch entry:
no interval, so no `Cut`.  A `FoldedCut` says what it is: equal runs, each cut alike.  Operators to which the order
along a dim does not matter (products, elementwise operators, reductions) work on it as on any cut dim; unflattening
makes the plain cut of it again.  The idea is torch's `_StridedShard`; here uneven and nested cuts fold as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from .chunks import Cut, cut_dim
from .errors import PlacementError
from .placements import Placement, Shard, StridedShard

__all__ = ["AnyCut", "FoldedCut", "cut_any", "folded", "interval_cut"]


@dataclass(frozen=True)
class FoldedCut:
    """One tensor dim of several that were folded into it, each cut by itself.

    Attributes:
        levels: pairs (runs, cut), runs ascending: the dim is `runs` equal runs, and each is cut so.  Pieces of a level
            are whole numbers of the next level's runs.
        length: elements of the dim.

    Example:
        >>> cut = FoldedCut(((3, Cut((0,), (2,), (2, 1))),), 9)  # (3, 3) folded, of which the second dim was cut 2 + 1
        >>> cut.size((0,)), cut.size((1,)), cut.shape
        (6, 3, (3, 3))
    """

    levels: tuple[tuple[int, Cut], ...]
    length: int

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes that cut the dim, the slowest level's first."""
        return tuple(axis for _, cut in self.levels for axis in cut.axes)

    @cached_property
    def even(self) -> bool:
        """Whether all ranks hold equally much."""
        return all(cut.even for _, cut in self.levels)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The dims of which it was folded, those that no axis cuts joined to the faster one before them."""
        runs = [count for count, _ in self.levels]
        starts = runs if runs[0] == 1 else [1, *runs]
        return tuple(b // a for a, b in pairwise([*starts, self.length]))

    def unfolded(self) -> tuple[Cut | None, ...]:
        """How each of the dims in `shape` is cut; None for whole ones."""
        inner = [self.length // runs for runs, _ in self.levels[1:]] + [1]
        cuts = tuple(cut.divided(unit) for (_, cut), unit in zip(self.levels, inner, strict=True))
        return cuts if self.levels[0][0] == 1 else (None, *cuts)

    def size(self, coordinate: Sequence[int]) -> int:
        """Number of elements that the rank at a mesh coordinate holds."""
        held = 1
        for n, cut in zip(self.shape, self.unfolded(), strict=True):
            held *= n if cut is None else cut.size(coordinate)
        return held

    def indices(self, coordinate: Sequence[int]) -> list[int]:
        """Global indices of the elements that the rank at a mesh coordinate holds, in its order."""
        found = [0]
        for n, cut in zip(self.shape, self.unfolded(), strict=True):
            start, stop = (0, n) if cut is None else cut.interval(coordinate)
            found = [i * n + j for i in found for j in range(start, stop)]
        return found

    def level(self, runs: int) -> Cut | None:
        """The cut of one run, where the dim is taken as so many runs; None if no axis cuts it so."""
        return dict(self.levels).get(runs)

    def runs_of(self, axis: int) -> int:
        """In how many runs a mesh axis cuts the dim."""
        return next(runs for runs, cut in self.levels if axis in cut.axes)

    def placements(self, dim: int) -> dict[int, Shard | StridedShard]:
        """The placement on tensor dim `dim` that each of the axes has."""
        found: dict[int, Shard | StridedShard] = {}
        for runs, cut in self.levels:
            for axis, placement in cut.placements(dim, explicit=runs > 1).items():
                strided = runs > 1 and placement.sizes is not None
                found[axis] = StridedShard(dim, split_factor=runs, sizes=placement.sizes) if strided else placement
        return found


AnyCut = Cut | FoldedCut


def folded(levels: Mapping[int, Cut], length: int) -> AnyCut | None:
    """A dim of `length` elements with these cuts (runs -> cut of one run); None if they do not fit together.

    Example:
        >>> whole = Cut((0,), (2,), (6, 6))
        >>> folded({1: whole}, 12) is whole, folded({1: Cut((0,), (2,), (7, 5)), 4: Cut((1,), (2,), (2, 1))}, 12)
        (True, None)
    """
    ascending = sorted(levels.items())
    if len(ascending) == 1 and ascending[0][0] == 1:
        return ascending[0][1]
    lengths = [length // runs for runs, _ in ascending]
    if any(runs * n != length or cut.length != n for (runs, cut), n in zip(ascending, lengths, strict=True)):
        return None
    for (_, cut), inner in zip(ascending, lengths[1:], strict=False):
        if any(size % inner for size in cut.sizes):
            return None
    return FoldedCut(tuple(ascending), length)


def cut_any(length: int, axes: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> AnyCut:
    """The cut of a dim by `axes`, outermost first, as their `Shard` and `StridedShard` placements say.

    Raises:
        PlacementError: if explicit sizes do not fit the dim, or each other.
    """
    by_runs: dict[int, list[int]] = {}
    for axis in axes:
        placement = placements[axis]
        by_runs.setdefault(placement.split_factor if isinstance(placement, StridedShard) else 1, []).append(axis)
    if list(by_runs) in ([], [1]):
        return cut_dim(length, axes, placements, mesh_shape)
    levels: dict[int, Cut] = {}
    for runs, of_level in by_runs.items():
        plain = [Shard(0, sizes=p.sizes) if isinstance(p, StridedShard) else p for p in placements]
        levels[runs] = cut_dim(length // runs, of_level, plain, mesh_shape)
    found = folded(levels, length)
    if found is None:
        told = ", ".join(repr(placements[axis]) for axis in axes)
        raise PlacementError(f"a dim of {length} elements cannot be cut by {told}: runs and pieces do not fit together")
    return found


def interval_cut(cut: AnyCut) -> Cut:
    """The same cut, for those who need every rank to hold one interval.

    Raises:
        PlacementError: if ranks hold several runs.
    """
    if isinstance(cut, Cut):
        return cut
    raise PlacementError(
        f"the dim of {cut.length} elements was folded of dims {cut.shape} of which inner ones are cut, so ranks do not "
        f"hold one interval of it; redistribute it first"
    )
