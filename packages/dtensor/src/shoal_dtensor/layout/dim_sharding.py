"""Shardings of one tensor dim over mesh axes, in integers only.

A `DimSharding` lists the mesh axes that shard the dim, outermost first, and the start and end of
every shard. Whatever the sharding (nested, uneven, ragged, any order of axes), shard `k` is one
contiguous interval, so every rank holds one box of the global tensor: redistribution, random
numbers, checkpoints and views build on that. `(batch, sequence) -> (batch * sequence)` with the
sequence sharded leaves every rank one run of elements for each batch entry instead of one interval.
The result is a `StridedDimSharding`, like torch's `_StridedShard`, but uneven and nested shardings
fold too. Operators that do not depend on the order along a dim work on it as on any sharded dim.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, pairwise
from math import prod

from shoal_mesh.internal import constant_when_compiled

from ..errors import PlacementError
from .placements import Placement, Shard, StridedShard

ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]


def chunk_sizes(length: int, shards: int, unit: int = 1) -> tuple[int, ...]:
    """Return the sizes of the `shards` of `torch.chunk`, divided only at multiples of `unit`."""
    # 10 over 4: (3, 3, 3, 1); 2 over 4: (1, 1, 0, 0)
    return _sizes(length, _step(length, shards, unit), shards)


def shard_sizes(size: int, placement: Shard | StridedShard, ranks: int) -> list[int]:
    """Return the elements of a dim on each rank of an axis.

    For 10 elements, `Shard(0, multiple_of=2)` over 4 ranks gives [4, 4, 2, 0].
    """
    if isinstance(placement, StridedShard):
        assert placement.sizes is not None, "styles say the sizes of strided shards"
        # 3 runs, each as 2 + 1: 6 + 3
        return [placement.split_factor * size for size in placement.sizes]
    return list(placement.sizes or chunk_sizes(size, ranks, placement.multiple_of))


def _step(length: int, shards: int, unit: int) -> int:
    """Return the elements of the first shard: ceil-sized in units of `unit`."""
    units = -(-length // unit)  # 10 elements in units of 4: 3
    # 3 units over 2 shards: 2 * 4 = 8 elements
    return -(-units // shards) * unit


def _sizes(length: int, step: int, shards: int) -> tuple[int, ...]:
    """Return the sizes of the shards: full ones of `step`, the rest, and empty ones."""
    full = int(length // step) if step else 0
    # 7: (3, 3) + (1, 0, 0, 0, 0), up to 4
    return ((step,) * full + (length - full * step, *(0,) * shards))[:shards]


@constant_when_compiled
@dataclass(frozen=True, init=False)
class DimSharding:
    """One tensor dim, sharded over mesh axes.

    7 elements over axes (0, 1) of sizes (2, 2): shard k = 2 * coordinate[0] + coordinate[1]

        element     0 1 | 2 3 || 4 5 | 6
        coordinate  0,0   0,1    1,0   1,1

    It is made of the sizes of all shards, row-major over the axes: (2, 2, 2, 1), which are steps of
    2, not ragged. Shards of `torch.chunk` are two integers, length and step, for any number of
    ranks.
    """

    # mesh axes that shard the dim, outermost first; empty when it is replicated
    axes: tuple[int, ...]
    axis_sizes: tuple[int, ...]
    length: int  # global number of elements
    step: int  # elements of the longest shard
    # elements of every shard if they are not `step` up to the end; None otherwise
    ragged: tuple[int, ...] | None
    # number of shards, empty ones too
    # compiled code reads the default from the class
    shards: int = field(default=1, compare=False, repr=False)
    # whether all shards are equally large
    even: bool = field(default=True, compare=False, repr=False)

    def __init__(
        self, axes: tuple[int, ...], axis_sizes: tuple[int, ...], sizes: tuple[int, ...]
    ) -> None:
        assert len(sizes) == prod(axis_sizes), "one size for each coordinate of the axes"
        sizes = tuple(map(int, sizes))  # symbols are for even shards
        length = sum(sizes)
        step = sizes[0]
        # None for (3, 3, 1); not for (1, 3, 3)
        ragged = None if sizes == _sizes(length, step, len(sizes)) else sizes
        self._set(axes, axis_sizes, length, step if ragged is None else max(sizes), ragged)

    @classmethod
    def chunks(
        cls, axes: tuple[int, ...], axis_sizes: tuple[int, ...], length: int, step: int
    ) -> DimSharding:
        """Return the sharding in shards of `step` elements, the last non-empty one shorter.

        For example 5 in steps of 2 are 2, 2, 1.
        """
        sharding: DimSharding = object.__new__(cls)
        sharding._set(axes, axis_sizes, length, min(step, length), None)
        return sharding

    @staticmethod
    def whole(length: int) -> DimSharding:
        """Return the sharding of a dim that every rank holds whole."""
        return (
            _whole(length, length)
            if type(length) is int
            else DimSharding.chunks((), (), length, length)
        )

    def _set(
        self,
        axes: tuple[int, ...],
        axis_sizes: tuple[int, ...],
        length: int,
        step: int,
        ragged: tuple[int, ...] | None,
    ) -> None:
        shards = prod(axis_sizes)
        even = ragged is None and bool(step * shards == length)  # 4 shards of 2 are 8, not 7
        self.__dict__.update(
            axes=axes,
            axis_sizes=axis_sizes,
            length=length,
            step=step,
            ragged=ragged,
            shards=shards,
            even=even,
        )

    # lengths may be symbols, which cannot be hashed
    def __hash__(self) -> int:
        return hash((self.axes, self.axis_sizes, self.ragged))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The elements of every shard: an entry per rank, so prefer one interval if possible."""
        return _sizes(self.length, self.step, self.shards) if self.ragged is None else self.ragged

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The global index of the first element of every shard."""
        return (0, *accumulate(self.sizes[:-1]))

    def index(self, coordinate: Sequence[int]) -> int:
        """Return the shard that the rank at a mesh coordinate holds."""
        shard = 0
        for axis, size in zip(self.axes, self.axis_sizes, strict=True):
            # coordinate (1, 1) on (2, 2): 1, then 1 * 2 + 1 = 3
            shard = shard * size + coordinate[axis]
        return shard

    def interval_of(self, shard: int) -> tuple[int, int]:
        """Return the global `[start, stop)` of a shard."""
        if self.ragged is None:
            start = shard and min(shard * self.step, self.length)  # 0 times a symbol is a symbol
            # 7 in steps of 2: shard 3 is (6, 7)
            return start, min((shard + 1) * self.step, self.length)
        start = self.offsets[shard]
        return start, start + self.ragged[shard]  # (1, 3, 3): shard 1 is (1, 4)

    def interval(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """Return the global `[start, stop)` that the rank at a mesh coordinate holds."""
        return self.interval_of(self.index(coordinate))

    def intervals(self, coordinate: Sequence[int]) -> list[tuple[int, int]]:
        """Return the interval in a list; a `StridedDimSharding` has several intervals."""
        return [self.interval(coordinate)]

    def size(self, coordinate: Sequence[int]) -> int:
        """Return the number of elements that the rank at a mesh coordinate holds."""
        if self.even:
            return self.step
        start, stop = self.interval(coordinate)
        return stop - start

    def indices(self, coordinate: Sequence[int]) -> list[int]:
        """Return the global indices of the elements that the rank at a mesh coordinate holds."""
        return [*range(*self.interval(coordinate))]

    def shard_with(self, index: int) -> int:
        """Return the shard that has element `index`, which is below the length."""
        return index // self.step if self.ragged is None else bisect_right(self.offsets, index) - 1

    def scaled(self, unit: int) -> DimSharding:
        """Return the same sharding with `unit` elements in place of every element."""
        return self if unit == 1 else self._resized(lambda size: size * unit)  # (1, 3) * 2: (2, 6)

    def divided(self, unit: int) -> DimSharding | None:
        """Return the same sharding counted in units of `unit` elements.

        None if a shard is not a whole number of units.
        """
        if unit == 1:
            return self
        # 12 in steps of 6 by 4: 6 % 4 = 2
        if any(size % unit for size in self.ragged or (self.step, self.length)):
            return None
        return self._resized(lambda size: size // unit)

    def _resized(self, resized: Callable[[int], int]) -> DimSharding:
        if self.ragged is None:
            return DimSharding.chunks(
                self.axes, self.axis_sizes, resized(self.length), resized(self.step)
            )
        return DimSharding(self.axes, self.axis_sizes, tuple(map(resized, self.ragged)))

    def outer(self, count: int) -> DimSharding:
        """Return the sharding by the `count` outermost axes alone."""
        if count == len(self.axes):
            return self
        if not count:
            return DimSharding.whole(self.length)
        axes = self.axes[:count]
        axis_sizes = self.axis_sizes[:count]
        inner = prod(self.axis_sizes[count:])
        if self.ragged is None:
            # 2, 2, 2, 1 by the outer: 4, 3
            return DimSharding.chunks(axes, axis_sizes, self.length, self.step * inner)
        # (2, 2, 2, 1) over (2, 2), by the outer axis: (2 + 2, 2 + 1)
        starts = range(0, self.shards, inner)
        return DimSharding(axes, axis_sizes, tuple(sum(self.ragged[i : i + inner]) for i in starts))

    def chunked(self, axis: int, ways: int, unit: int = 1) -> DimSharding:
        """Return every shard sharded by one more axis, as `torch.chunk` at multiples of `unit`."""
        # 7 elements over (2, 2): shards of 4 and 3, both in steps of 2, so every boundary is a
        # multiple of 2.
        # 10 elements: shards of 5 in steps of 3, with boundaries at 0, 3, 5 and 8, which is ragged.
        axes = (*self.axes, axis)
        axis_sizes = (*self.axis_sizes, ways)
        # a symbol stays one where the shards are even
        if type(self.length) is not int:
            if self.even and not self.step % (ways * unit):
                return DimSharding.chunks(axes, axis_sizes, self.length, self.step // ways)
            return DimSharding(self.axes, self.axis_sizes, self.sizes).chunked(axis, ways, unit)
        if self.ragged is None:
            step = _step(self.step, ways, unit)
            last = self.length % self.step if self.step else 0
            # steps of 4, then 2: 2 * 2 == 4
            aligned = self.step == self.length or step * ways == self.step
            if aligned and (not last or min(_step(last, ways, unit), last) == min(step, last)):
                return DimSharding.chunks(axes, axis_sizes, self.length, step)
        # of thousands of shards few differ
        inner = {size: chunk_sizes(size, ways, unit) for size in {*self.sizes}}
        return DimSharding(
            axes, axis_sizes, tuple(chain.from_iterable([inner[size] for size in self.sizes]))
        )

    def in_written_order(self) -> DimSharding:
        """Return the same shards with the axes in the order that placements imply.

        Placements do not give the position of axes of one rank.
        """
        if 1 not in self.axis_sizes:
            return self
        sizes = dict(zip(self.axes, self.axis_sizes, strict=True))
        axes = order_of_axes(0, shards_before(self.axes, self.axis_sizes), sizes)
        sharding: DimSharding = object.__new__(DimSharding)
        axis_sizes = tuple([sizes[axis] for axis in axes])
        sharding._set(axes, axis_sizes, self.length, self.step, self.ragged)
        return sharding

    def rechunked(self, length: int) -> DimSharding:
        """Return `length` elements sharded over the same axes in the sizes of `torch.chunk`."""
        sharding = DimSharding.whole(length)
        for axis, ways in zip(self.axes, self.axis_sizes, strict=True):
            sharding = sharding.chunked(axis, ways)
        return sharding

    def resharded(self, before: Callable[[int], int], length: int) -> DimSharding:
        """Return `length` elements sharded over the same axes.

        `before(n)` of them are in the shards before the shard that began at `n`.
        """
        bounds = [0, *map(before, self.offsets[1:]), length]
        return DimSharding(self.axes, self.axis_sizes, tuple([b - a for a, b in pairwise(bounds)]))

    def placements(self, dim: int) -> dict[int, Shard | StridedShard]:
        """Return the placement of each axis on tensor dim `dim`, with sizes where needed."""
        outer_shards = shards_before(self.axes, self.axis_sizes)
        placements: dict[int, Shard | StridedShard] = {}
        if self.even:
            for axis in self.axes:
                placements[axis] = in_order(Shard(dim), outer_shards[axis])
            return placements
        here = self.outer(0)
        for count, (axis, ways) in enumerate(zip(self.axes, self.axis_sizes, strict=True), 1):
            default = here.chunked(axis, ways)
            here = self.outer(count)
            placement = Shard(dim, sizes=None if here == default else here.sizes)
            placements[axis] = in_order(placement, outer_shards[axis])
        return placements


def order_of_axes(
    dim: int, outer_shards: Mapping[int, int], mesh_shape: Sequence[int] | Mapping[int, int]
) -> tuple[int, ...]:
    """Return the axes of a dim, outermost first.

    They are ascending, but each axis comes after axes to its right that make its number of outer
    shards.

    `{0: 2, 1: 1}` on a mesh (4, 2) is (1, 0). Axes of one rank come as late as possible.

    Raises:
        PlacementError: if no leading part of the axes to the right makes this number of shards.
    """
    order: tuple[int, ...] = ()
    for axis in sorted(outer_shards, reverse=True):
        wanted = outer_shards[axis]
        count = 1
        position = 0
        while count != wanted and position < len(order):
            count *= mesh_shape[order[position]]
            position += 1
        if count != wanted:
            raise PlacementError(
                f"mesh axis {axis}: its placement says that axes to its right make {wanted} shards "
                f"of dim {dim} before it, as StridedShard(dim={dim}, split_factor={wanted}) does; "
                "the axes to its right that shard the dim have sizes "
                f"{[mesh_shape[other] for other in order]}, and no leading part of them multiplies "
                f"to {wanted}. Use a factor to which one does, or pad the dim to a multiple of "
                f"{wanted}: alone on a dim that it divides, a factor counts equal runs"
            )
        order = (*order[:position], axis, *order[position:])
    return order


def shards_before(axes: Sequence[int], axis_sizes: Sequence[int]) -> dict[int, int]:
    """Return for each axis of a dim the number of shards that axes to its right make before it.

    Axes (2, 0, 1) of sizes (3, 2, 2): axis 2 makes 3 shards before axes 0 and 1, so {2: 1, 0: 3,
    1: 3}.
    """
    counts: dict[int, int] = {}
    for position, axis in enumerate(axes):
        outer = zip(axes[:position], axis_sizes[:position], strict=True)
        counts[axis] = prod([size for other, size in outer if other > axis])
    return counts


def in_order(placement: Shard | StridedShard, outer_shards: int) -> Shard | StridedShard:
    """Return the placement of an axis that shards a dim after axes to its right.

    These axes make `outer_shards` shards of the dim.
    """
    if outer_shards == 1:
        return placement
    if placement.sizes is None:
        return StridedShard(
            placement.dim, split_factor=outer_shards, multiple_of=placement.multiple_of
        )
    runs = placement.split_factor if isinstance(placement, StridedShard) else 1
    return StridedShard(
        placement.dim, split_factor=runs, sizes=placement.sizes, outer_shards=outer_shards
    )


_whole = lru_cache(maxsize=4096)(partial(DimSharding.chunks, (), ()))


def shard_dim(
    length: int, axes: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> DimSharding:
    """Return the sharding of a dim by `axes`, outermost first, with their `Shard` placements.

    The dim has `length` elements.
    """
    sharding = DimSharding.whole(length)
    for axis in axes:
        placement = placements[axis]
        ways = mesh_shape[axis]
        assert isinstance(placement, Shard), "only Shard placements shard a dim"
        if placement.sizes is None:
            sharding = sharding.chunked(axis, ways, placement.multiple_of)
            continue
        sizes = placement.sizes
        shards = sharding.sizes
        # (3, 1, 2, 2) inside of 4 + 4
        sums = tuple([sum(sizes[i : i + ways]) for i in range(0, len(sizes), ways)])
        if len(sizes) != len(shards) * ways or sums != shards:
            raise PlacementError(
                f"{placement!r} on mesh axis {axis}: expected {len(shards) * ways} sizes, {ways} "
                f"for each shard that the outer axes make, which add up to {shards}, got "
                f"{len(sizes)} that add up to {sums}"
            )
        sharding = DimSharding((*sharding.axes, axis), (*sharding.axis_sizes, ways), sizes)
    return sharding


@dataclass(frozen=True)
class StridedDimSharding:
    """One tensor dim that several dims were folded into, each sharded by itself.

    (2, 6), its second dim over 2 ranks, as one dim of 12: one level of 2 runs, each sharded as 3 +
    3

        element  0 1 2 | 3 4 5 || 6 7 8 | 9 10 11
        rank       0       1        0       1
    """

    # pairs (runs, sharding), runs ascending: the dim is `runs` equal runs, and each is sharded so;
    # shards of a level are multiples of the next level's runs.
    levels: tuple[tuple[int, DimSharding], ...]
    length: int  # elements of the dim

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes that shard the dim, the slowest level's first."""
        return tuple(axis for _, sharding in self.levels for axis in sharding.axes)

    @cached_property
    def even(self) -> bool:
        """True if all ranks hold the same number of elements."""
        return all(sharding.even for _, sharding in self.levels)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The dims that were folded; dims that are not sharded are joined to the dim before."""
        runs = [count for count, _ in self.levels]
        starts = runs if runs[0] == 1 else [1, *runs]  # 12 elements in 2 runs: [1, 2]
        # [1, 2, 12]: dims of (2, 6)
        return tuple(b // a for a, b in pairwise([*starts, self.length]))

    @cached_property
    def _folded(self) -> list[tuple[int, DimSharding | None]]:
        """The size and sharding of each of the dims in `shape`; None for replicated ones."""
        # 12, levels of 1 and 4 runs: [3, 1]
        inner = [self.length // runs for runs, _ in self.levels[1:]] + [1]
        shardings = [
            sharding.divided(unit) for (_, sharding), unit in zip(self.levels, inner, strict=True)
        ]
        return [
            *zip(
                self.shape, shardings if self.levels[0][0] == 1 else [None, *shardings], strict=True
            )
        ]

    def size(self, coordinate: Sequence[int]) -> int:
        """Return the number of elements that the rank at a mesh coordinate holds."""
        # 2 * 3 = 6
        return prod(
            n if sharding is None else sharding.size(coordinate) for n, sharding in self._folded
        )

    def indices(self, coordinate: Sequence[int]) -> list[int]:
        """Return the global indices of the elements of the rank at a coordinate, in its order."""
        return [i for start, stop in self.intervals(coordinate) for i in range(start, stop)]

    def intervals(self, coordinate: Sequence[int]) -> list[tuple[int, int]]:
        """Return the global `[start, stop)` of every run of the rank at a coordinate, in order."""
        # of the slower dims: (2, 6), its rows whole and columns 3..5, are 0..1, then 3..5 and 9..11
        runs = [(0, 1)]
        for n, sharding in self._folded:
            start, stop = (0, n) if sharding is None else sharding.interval(coordinate)
            if (start, stop) == (0, n):
                # the 2 rows of (2, 6): (0, 2)
                runs = [(first * n, last * n) for first, last in runs]
            else:
                runs = [
                    (i * n + start, i * n + stop)
                    for first, last in runs
                    for i in range(first, last)
                ]
        return [(start, stop) for start, stop in runs if start < stop]

    def level(self, runs: int) -> DimSharding | None:
        """Return the sharding of one of `runs` runs of the dim; None if no axis shards it so."""
        return dict(self.levels).get(runs)

    def runs_of(self, axis: int) -> int:
        """Return the number of runs in which a mesh axis shards the dim."""
        return next(runs for runs, sharding in self.levels if axis in sharding.axes)

    def in_written_order(self) -> StridedDimSharding:
        """Return the same shards with the axes in the order that placements imply."""
        levels = tuple([(runs, sharding.in_written_order()) for runs, sharding in self.levels])
        return StridedDimSharding(levels, self.length)

    def placements(self, dim: int) -> dict[int, Shard | StridedShard]:
        """Return the placement of each axis on tensor dim `dim`."""
        by_axis: dict[int, Shard | StridedShard] = {}
        for runs, sharding in self.levels:
            if runs == 1:
                by_axis |= sharding.placements(dim)
                continue
            outer_shards = shards_before(sharding.axes, sharding.axis_sizes)
            for count, axis in enumerate(sharding.axes, 1):
                by_axis[axis] = StridedShard(
                    dim,
                    split_factor=runs,
                    sizes=sharding.outer(count).sizes,
                    outer_shards=outer_shards[axis],
                )
        return by_axis


AnyDimSharding = DimSharding | StridedDimSharding


def fold_levels(levels: Mapping[int, DimSharding], length: int) -> AnyDimSharding | None:
    """Return a dim of `length` elements with these shardings; None if they do not fit.

    `levels` maps a number of runs to the sharding of one run.
    """
    ascending = sorted(levels.items())
    if len(ascending) == 1 and ascending[0][0] == 1:
        return ascending[0][1]
    lengths = [length // runs for runs, _ in ascending]  # 12 in 1 and 4 runs: [12, 3]
    for (runs, sharding), n, inner in zip(ascending, lengths, [*lengths[1:], 1], strict=True):
        # 7 + 5: no whole rows of 3
        if runs * n != length or sharding.length != n or sharding.divided(inner) is None:
            return None
    return StridedDimSharding(tuple(ascending), length)


def shard_any_dim(
    length: int, axes: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> AnyDimSharding:
    """Return the sharding of a dim by `axes` with `Shard` and `StridedShard` placements.

    The axes are given outermost first.
    """
    if not axes:
        return DimSharding.whole(length)
    by_runs: dict[int, list[int]] = {}
    for axis in axes:
        placement = placements[axis]
        by_runs.setdefault(
            placement.split_factor if isinstance(placement, StridedShard) else 1, []
        ).append(axis)
    if list(by_runs) == [1]:
        return shard_dim(length, axes, placements, mesh_shape)
    levels: dict[int, DimSharding] = {}
    # a symbol becomes a constant, because folding depends on its divisors
    length = int(length)
    for runs, of_level in by_runs.items():
        plain = [Shard(0, sizes=p.sizes) if isinstance(p, StridedShard) else p for p in placements]
        # 12 in 2 runs: 6, as 3 + 3
        levels[runs] = shard_dim(length // runs, of_level, plain, mesh_shape)
    sharding = fold_levels(levels, length)
    if sharding is None:
        asked = ", ".join(repr(placements[axis]) for axis in axes)
        raise PlacementError(
            f"a dim of {length} elements cannot be sharded by {asked}: runs and shards do not fit "
            "together. Pad the dim to a multiple of split_factor, or shard it by Shard(dim, "
            "sizes=...)"
        )
    return sharding
