"""How a tensor dim is sharded that was several dims before a reshape: integers only.

`(batch, sequence) -> (batch * sequence)` with the sequence sharded leaves every rank one run of elements for each batch
entry: no interval, so no `DimSharding`.  A `StridedDimSharding` says what it is: equal runs, each sharded alike.
Operators to which the order along a dim does not matter (products, elementwise operators, reductions) work on it as on
any sharded dim; unflattening makes a plain sharding of it again.  The idea is that of `_StridedShard` in torch; here
uneven and nested shardings fold as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from ..errors import PlacementError
from .dim_sharding import DimSharding, ShardOrder, shard_dim
from .placements import Placement, Shard, StridedShard


@dataclass(frozen=True)
class StridedDimSharding:
    """One tensor dim of several that were folded into it, each sharded by itself.

    (2, 6), its second dim over 2 ranks, as one dim of 12: one level of 2 runs, each sharded as 3 + 3

        element  0 1 2 | 3 4 5 || 6 7 8 | 9 10 11
        rank       0       1        0       1
    """

    # pairs (runs, sharding), runs ascending: the dim is `runs` equal runs, and each is sharded so; shards of a level
    # are multiples of the next level's runs.
    levels: tuple[tuple[int, DimSharding], ...]
    length: int  # elements of the dim

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes that shard the dim, the slowest level's first."""
        return tuple(axis for _, sharding in self.levels for axis in sharding.axes)

    @cached_property
    def even(self) -> bool:
        """Whether all ranks hold equally much."""
        return all(sharding.even for _, sharding in self.levels)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The dims of which it was folded, those that no axis shards joined to the faster one before them."""
        runs = [count for count, _ in self.levels]
        starts = runs if runs[0] == 1 else [1, *runs]  # 12 elements in 2 runs: [1, 2]
        return tuple(b // a for a, b in pairwise([*starts, self.length]))  # [1, 2, 12]: dims of (2, 6)

    @cached_property
    def _folded(self) -> list[tuple[int, DimSharding | None]]:
        """Size and sharding of each of the dims in `shape`; None for replicated ones.

        12 elements, 2 runs sharded as 3 + 3: a replicated dim of 2 and one of 6, sharded as 3 + 3.
        """
        inner = [self.length // runs for runs, _ in self.levels[1:]] + [1]  # 12, levels of 1 and 4 runs: [3, 1]
        shardings = [sharding.divided(unit) for (_, sharding), unit in zip(self.levels, inner, strict=True)]
        return [*zip(self.shape, shardings if self.levels[0][0] == 1 else [None, *shardings], strict=True)]

    def size(self, coordinate: Sequence[int]) -> int:
        """Number of elements that the rank at a mesh coordinate holds."""
        return prod(n if sharding is None else sharding.size(coordinate) for n, sharding in self._folded)  # 2 * 3 = 6

    def indices(self, coordinate: Sequence[int]) -> list[int]:
        """Global indices of the elements that the rank at a mesh coordinate holds, in its order."""
        return [i for start, stop in self.intervals(coordinate) for i in range(start, stop)]

    def intervals(self, coordinate: Sequence[int]) -> list[tuple[int, int]]:
        """Global `[start, stop)` of every run of elements that the rank at a mesh coordinate holds, in its order."""
        runs = [(0, 1)]  # of the slower dims: (2, 6), its rows whole and columns 3..5, are 0..1, then 3..5 and 9..11
        for n, sharding in self._folded:
            start, stop = (0, n) if sharding is None else sharding.interval(coordinate)
            if (start, stop) == (0, n):
                runs = [(first * n, last * n) for first, last in runs]  # the 2 rows of (2, 6): (0, 2)
            else:
                runs = [(i * n + start, i * n + stop) for first, last in runs for i in range(first, last)]
        return [(start, stop) for start, stop in runs if start < stop]

    def level(self, runs: int) -> DimSharding | None:
        """The sharding of one run, where the dim is taken as so many runs; None if no axis shards it so."""
        return dict(self.levels).get(runs)

    def runs_of(self, axis: int) -> int:
        """In how many runs a mesh axis shards the dim."""
        return next(runs for runs, sharding in self.levels if axis in sharding.axes)

    def placements(self, dim: int) -> dict[int, Shard | StridedShard]:
        """The placement on tensor dim `dim` that each of the axes has."""
        by_axis: dict[int, Shard | StridedShard] = {}
        for runs, sharding in self.levels:
            for axis, placement in sharding.placements(dim, explicit=runs > 1).items():
                strided = runs > 1 and placement.sizes is not None
                by_axis[axis] = StridedShard(dim, split_factor=runs, sizes=placement.sizes) if strided else placement
        return by_axis


AnyDimSharding = DimSharding | StridedDimSharding


def fold_levels(levels: Mapping[int, DimSharding], length: int) -> AnyDimSharding | None:
    """A dim of `length` elements with these shardings (runs -> sharding of one run); None if they do not fit."""
    ascending = sorted(levels.items())
    if len(ascending) == 1 and ascending[0][0] == 1:
        return ascending[0][1]
    lengths = [length // runs for runs, _ in ascending]  # 12 in 1 and 4 runs: [12, 3]
    for (runs, sharding), n, inner in zip(ascending, lengths, [*lengths[1:], 1], strict=True):
        if runs * n != length or sharding.length != n or sharding.divided(inner) is None:  # 7 + 5: no whole rows of 3
            return None
    return StridedDimSharding(tuple(ascending), length)


def shard_any_dim(
    length: int, axes: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> AnyDimSharding:
    """The sharding of a dim by `axes`, outermost first, as their `Shard` and `StridedShard` placements.

    PlacementError if explicit sizes do not fit the dim, or each other.
    """
    if not axes:
        return DimSharding.whole(length)
    by_runs: dict[int, list[int]] = {}
    for axis in axes:
        placement = placements[axis]
        by_runs.setdefault(placement.split_factor if isinstance(placement, StridedShard) else 1, []).append(axis)
    if list(by_runs) == [1]:
        return shard_dim(length, axes, placements, mesh_shape)
    levels: dict[int, DimSharding] = {}
    length = int(length)  # a symbol becomes a constant: what folds is decided by divisors
    for runs, of_level in by_runs.items():
        plain = [Shard(0, sizes=p.sizes) if isinstance(p, StridedShard) else p for p in placements]
        levels[runs] = shard_dim(length // runs, of_level, plain, mesh_shape)  # 12 in 2 runs: 6, as 3 + 3
    sharding = fold_levels(levels, length)
    if sharding is None:
        asked = ", ".join(repr(placements[axis]) for axis in axes)
        raise PlacementError(
            f"a dim of {length} elements cannot be sharded by {asked}: runs and shards do not fit together. Pad the "
            "dim to a multiple of split_factor, or shard it by Shard(dim, sizes=...)"
        )
    return sharding


def shard_dims(
    shape: Sequence[int], order: ShardOrder, placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> tuple[AnyDimSharding, ...]:
    """The shardings of all dims; `order` has the axes of the sharded ones; errors as of `shard_any_dim`."""
    axes_of = dict(order)
    return tuple([shard_any_dim(n, axes_of.get(dim, ()), placements, mesh_shape) for dim, n in enumerate(shape)])
