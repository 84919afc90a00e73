"""Shardings of one tensor dim over mesh axes, in integers only.

A `DimSharding` lists the mesh axes that shard the dim, outermost first, and the start and end of
every shard. In every such sharding (nested, uneven, ragged, with any order of axes) shard `k` is
one contiguous interval, so every rank holds one box of the global tensor. Redistribution, random
numbers, checkpoints and views depend on this.

A reshape `(batch, sequence) -> (batch * sequence)` with the sequence sharded gives every rank one
run of elements for each batch entry instead of one interval. Its result is a `StridedDimSharding`,
which corresponds to torch's `_StridedShard` but allows uneven and nested shardings. Operators that
do not depend on the order of elements along a dim treat it like any sharded dim.
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
from .axis_order import order_of_axes, shards_before
from .placements import Placement, Shard, StridedShard

ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]


def chunk_sizes(length: int, shards: int, unit: int = 1) -> tuple[int, ...]:
    """Return the sizes of the `shards` of `torch.chunk`, divided only at multiples of `unit`.

    For example, 10 elements in 4 shards have the sizes (3, 3, 3, 1), and 2 elements (1, 1, 0, 0).
    """
    return _sizes(length, _step(length, shards, unit), shards)


def shard_sizes(size: int, placement: Shard | StridedShard, ranks: int) -> list[int]:
    """Return the elements of a dim on each rank of an axis.

    For 10 elements, `Shard(0, multiple_of=2)` over 4 ranks gives [4, 4, 2, 0].
    """
    if isinstance(placement, StridedShard):
        # Without sizes a StridedShard only expresses an order of axes; no caller passes one here.
        assert placement.sizes is not None, "a StridedShard of runs has the sizes of their shards"
        # Example: 3 runs, each sharded as 2 + 1, give 6 and 3 elements.
        return [placement.split_factor * size for size in placement.sizes]
    return list(placement.sizes or chunk_sizes(size, ranks, placement.multiple_of))


def _step(length: int, shards: int, unit: int) -> int:
    """Return the number of elements of the first shard, a multiple of `unit`."""
    # Example: 10 elements are 3 units of 4.
    units = -(-length // unit)
    # The first of 2 shards has 2 of these 3 units, which are 8 elements.
    units_of_first = -(-units // shards)
    return units_of_first * unit


def _sizes(length: int, step: int, shards: int) -> tuple[int, ...]:
    """Return the sizes of the shards: full shards of `step`, a shorter one, and empty ones."""
    full = int(length // step) if step else 0
    rest = length - full * step
    # Example: 7 elements in 4 shards of up to 3 are 2 full shards and a rest of 1. The sizes are
    # the first 4 of (3, 3, 1, 0, 0, 0, 0).
    sizes = (step,) * full + (rest, *(0,) * shards)
    return sizes[:shards]


# Graphs of torch.compile have shardings as constants.
@constant_when_compiled
@dataclass(frozen=True, init=False)
class DimSharding:
    """One tensor dim, sharded over mesh axes.

    Example: 7 elements over axes (0, 1) of sizes (2, 2). The rank at `coordinate` holds shard
    2 * coordinate[0] + coordinate[1]:

        element     0 1 | 2 3 || 4 5 | 6
        coordinate  0,0   0,1    1,0   1,1

    The constructor gets the sizes of all shards, row-major over the axes: here (2, 2, 2, 1). If all
    shards have `step` elements up to the end of the dim, as here, only length and step are stored,
    for any number of ranks. Otherwise the sharding is ragged and stores all sizes.
    """

    # mesh axes that shard the dim, outermost first; empty when it is replicated
    axes: tuple[int, ...]
    axis_sizes: tuple[int, ...]
    length: int  # global number of elements
    step: int  # elements of the longest shard
    # elements of every shard if the sharding is ragged; None otherwise
    ragged: tuple[int, ...] | None
    # number of shards, empty shards included
    # (`_set` computes this field and the next one; torch.compile traces reads of an attribute only
    # if the class has the attribute, which the defaults ensure)
    shards: int = field(default=1, compare=False, repr=False)
    # whether all shards are equally large
    even: bool = field(default=True, compare=False, repr=False)

    def __init__(
        self, axes: tuple[int, ...], axis_sizes: tuple[int, ...], sizes: tuple[int, ...]
    ) -> None:
        assert len(sizes) == prod(axis_sizes), "one size for each coordinate of the axes"
        # While torch.compile traces dynamic shapes, sizes may be symbols (`torch.SymInt`). `int`
        # replaces a symbol by the value that it has now. `chunks` keeps symbols.
        sizes = tuple(map(int, sizes))
        length = sum(sizes)
        step = sizes[0]
        # Example: (3, 3, 1) is not ragged, (1, 3, 3) is.
        if sizes == _sizes(length, step, len(sizes)):
            self._set(axes, axis_sizes, length, step, ragged=None)
        else:
            self._set(axes, axis_sizes, length, max(sizes), ragged=sizes)

    @classmethod
    def chunks(
        cls, axes: tuple[int, ...], axis_sizes: tuple[int, ...], length: int, step: int
    ) -> DimSharding:
        """Return the sharding in shards of `step` elements; the last non-empty one may be shorter.

        For example, 5 elements in steps of 2 have the sizes (2, 2, 1).
        """
        sharding: DimSharding = object.__new__(cls)
        sharding._set(axes, axis_sizes, length, min(step, length), ragged=None)
        return sharding

    @staticmethod
    def whole(length: int) -> DimSharding:
        """Return the sharding of a dim that every rank holds whole."""
        if type(length) is int:
            return _cached_chunks(length, length)
        # A symbol cannot be the key of a cache.
        return DimSharding.chunks((), (), length, length)

    def _set(
        self,
        axes: tuple[int, ...],
        axis_sizes: tuple[int, ...],
        length: int,
        step: int,
        ragged: tuple[int, ...] | None,
    ) -> None:
        """Set the fields, and the attributes that follow from them."""
        shards = prod(axis_sizes)
        # Example: 4 shards of 2 elements are not filled by 7 elements.
        is_filled = bool(step * shards == length)
        self.__dict__.update(
            axes=axes,
            axis_sizes=axis_sizes,
            length=length,
            step=step,
            ragged=ragged,
            shards=shards,
            even=ragged is None and is_filled,
        )

    # lengths may be symbols, which cannot be hashed
    def __hash__(self) -> int:
        return hash((self.axes, self.axis_sizes, self.ragged))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The elements of every shard; prefer `interval_of` if one shard is enough."""
        if self.ragged is not None:
            return self.ragged
        return _sizes(self.length, self.step, self.shards)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The global index of the first element of every shard."""
        return (0, *accumulate(self.sizes[:-1]))

    def index(self, coordinate: Sequence[int]) -> int:
        """Return the shard that the rank at a mesh coordinate holds."""
        shard = 0
        for axis, size in zip(self.axes, self.axis_sizes, strict=True):
            # Example: for coordinate (1, 1) on (2, 2) it is 1, then 1 * 2 + 1 = 3.
            shard = shard * size + coordinate[axis]
        return shard

    def interval_of(self, shard: int) -> tuple[int, int]:
        """Return the global `[start, stop)` of a shard."""
        if self.ragged is not None:
            # Example: shard 1 of sizes (1, 3, 3) is (1, 4).
            start = self.offsets[shard]
            return start, start + self.ragged[shard]
        # Shard 0 starts at the integer 0, because 0 times a symbol would be a symbol.
        start = shard and min(shard * self.step, self.length)
        # Example: of 7 elements in steps of 2, shard 3 is (6, 7).
        stop = min((shard + 1) * self.step, self.length)
        return start, stop

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
        if self.ragged is None:
            return index // self.step
        return bisect_right(self.offsets, index) - 1

    def scaled(self, unit: int) -> DimSharding:
        """Return the same sharding with `unit` elements in place of every element."""
        if unit == 1:
            return self
        # Example: sizes (1, 3) in units of 2 are (2, 6).
        return self._resized(lambda size: size * unit)

    def divided(self, unit: int) -> DimSharding | None:
        """Return the same sharding counted in units of `unit` elements.

        Return None if a shard is not a whole number of units.
        """
        if unit == 1:
            return self
        # Example: steps of 6 are not whole units of 4.
        sizes = self.ragged or (self.step, self.length)
        if any(size % unit for size in sizes):
            return None
        return self._resized(lambda size: size // unit)

    def _resized(self, resize: Callable[[int], int]) -> DimSharding:
        if self.ragged is None:
            length = resize(self.length)
            return DimSharding.chunks(self.axes, self.axis_sizes, length, resize(self.step))
        return DimSharding(self.axes, self.axis_sizes, tuple(map(resize, self.ragged)))

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
            # Example: sizes (2, 2, 2, 1) over axes of (2, 2) are (4, 3) by the outer axis.
            return DimSharding.chunks(axes, axis_sizes, self.length, self.step * inner)
        # Example: sizes (1, 2, 2, 2) over axes of (2, 2) are (1 + 2, 2 + 2) by the outer axis.
        starts = range(0, self.shards, inner)
        sizes = [sum(self.ragged[start : start + inner]) for start in starts]
        return DimSharding(axes, axis_sizes, tuple(sizes))

    def chunked(self, axis: int, ranks: int, unit: int = 1) -> DimSharding:
        """Return the sharding in which one more axis divides every shard like `torch.chunk`.

        Shards are divided only at multiples of `unit`.
        """
        axes = (*self.axes, axis)
        axis_sizes = (*self.axis_sizes, ranks)
        # A symbolic length stays a symbol if the shards are even.
        if type(self.length) is not int:
            if self.even and not self.step % (ranks * unit):
                return DimSharding.chunks(axes, axis_sizes, self.length, self.step // ranks)
            # The constructor replaces symbols by their values.
            without_symbols = DimSharding(self.axes, self.axis_sizes, self.sizes)
            return without_symbols.chunked(axis, ranks, unit)
        if self._is_uniform_chunked(ranks, unit):
            step = _step(self.step, ranks, unit)
            return DimSharding.chunks(axes, axis_sizes, self.length, step)
        # Thousands of shards have only a few different sizes.
        inner = {size: chunk_sizes(size, ranks, unit) for size in {*self.sizes}}
        sizes = chain.from_iterable([inner[size] for size in self.sizes])
        return DimSharding(axes, axis_sizes, tuple(sizes))

    def _is_uniform_chunked(self, ranks: int, unit: int) -> bool:
        """Tell whether the sharding is not ragged after each shard is chunked over `ranks`."""
        # Example: 7 elements over (2, 2) are shards of 4 and 3, both in steps of 2, so every
        # boundary is a multiple of 2. But 10 elements are shards of 5 in steps of 3, with
        # boundaries at 0, 3, 5 and 8, which is ragged.
        if self.ragged is not None:
            return False
        step = _step(self.step, ranks, unit)
        # If one shard has all elements, no shard follows that would have to begin at a multiple of
        # `step`.
        is_single = self.step == self.length
        # Example: shards of 4, divided over 2 ranks in steps of 2: 2 * 2 == 4.
        if not is_single and step * ranks != self.step:
            return False
        last = self.length % self.step if self.step else 0
        if not last:
            return True
        # The last shard is shorter. Example: in shards of 4 and 3, the first part of the last one
        # has 2 elements, as in steps of 2. A part is at most as long as its shard.
        part_of_last = min(_step(last, ranks, unit), last)
        return part_of_last == min(step, last)

    def in_written_order(self) -> DimSharding:
        """Return the same shards with the axes in the order in which placements are read.

        An axis of one rank may be anywhere among the axes without a change of the shards or of the
        placements. It moves to the position where `order_of_axes` reads it. Other axes stay.
        """
        if 1 not in self.axis_sizes:
            return self
        sizes = dict(zip(self.axes, self.axis_sizes, strict=True))
        outer_shards = shards_before(self.axes, self.axis_sizes)
        # The dim is for messages only: these axes have an order.
        axes = order_of_axes(dim=0, outer_shards=outer_shards, mesh_shape=sizes)
        axis_sizes = tuple([sizes[axis] for axis in axes])
        sharding: DimSharding = object.__new__(DimSharding)
        sharding._set(axes, axis_sizes, self.length, self.step, ragged=self.ragged)
        return sharding

    def rechunked(self, length: int) -> DimSharding:
        """Return `length` elements sharded over the same axes in the sizes of `torch.chunk`."""
        sharding = DimSharding.whole(length)
        for axis, ranks in zip(self.axes, self.axis_sizes, strict=True):
            sharding = sharding.chunked(axis, ranks)
        return sharding

    def resharded(self, before: Callable[[int], int], length: int) -> DimSharding:
        """Return `length` elements sharded over the same axes.

        `before` maps the first index of an old shard to the first index of the new shard.
        """
        bounds = [0, *map(before, self.offsets[1:]), length]
        sizes = [stop - start for start, stop in pairwise(bounds)]
        return DimSharding(self.axes, self.axis_sizes, tuple(sizes))

    def placements(self, dim: int) -> dict[int, Shard | StridedShard]:
        """Return the placement of each axis on tensor dim `dim`, with sizes where needed."""
        if self.even and len(self.axes) == 1:
            return {self.axes[0]: Shard(dim)}
        outer_shards = shards_before(self.axes, self.axis_sizes)
        placements: dict[int, Shard | StridedShard] = {}
        if self.even:
            for axis in self.axes:
                placements[axis] = in_order(Shard(dim), outer_shards[axis])
            return placements
        before_axis = self.outer(0)
        for count, (axis, ranks) in enumerate(zip(self.axes, self.axis_sizes, strict=True), 1):
            after_axis = self.outer(count)
            # A placement without sizes stands for the sizes of torch.chunk.
            is_chunked = after_axis == before_axis.chunked(axis, ranks)
            sizes = None if is_chunked else after_axis.sizes
            placements[axis] = in_order(Shard(dim, sizes=sizes), outer_shards[axis])
            before_axis = after_axis
        return placements


def in_order(placement: Shard | StridedShard, outer_shards: int) -> Shard | StridedShard:
    """Return the placement of an axis that shards its dim after some of the axes to its right.

    Without such axes, the leftmost axis of a dim is the outermost one.

    Args:
        placement: the placement if no axis to the right came first.
        outer_shards: the number of shards that these axes make of the dim. For 1 there are none,
            and `placement` is returned.
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


# A cache of `DimSharding.chunks((), (), length, step)` for `DimSharding.whole`.
_chunks_over_no_axis = partial(DimSharding.chunks, (), ())
_cached_chunks = lru_cache(maxsize=4096)(_chunks_over_no_axis)


def shard_dim(
    length: int, axes: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> DimSharding:
    """Return the sharding of a dim by `axes`, outermost first, with their `Shard` placements.

    The dim has `length` elements.
    """
    sharding = DimSharding.whole(length)
    for axis in axes:
        placement = placements[axis]
        ranks = mesh_shape[axis]
        assert isinstance(placement, Shard), "only Shard placements shard a dim"
        if placement.sizes is None:
            sharding = sharding.chunked(axis, ranks, placement.multiple_of)
            continue
        sizes = placement.sizes
        shards = sharding.sizes
        # Example: sizes (3, 1, 2, 2) divide shards of 3 + 1 and 2 + 2 elements.
        starts = range(0, len(sizes), ranks)
        sums = tuple([sum(sizes[start : start + ranks]) for start in starts])
        expected = len(shards) * ranks
        count = len(sizes)
        if count != expected or sums != shards:
            raise PlacementError(
                f"{placement!r} on mesh axis {axis}: expected {expected} sizes, {ranks} "
                f"for each shard that the outer axes make, which add up to {shards}, got "
                f"{count} that add up to {sums}"
            )
        sharding = DimSharding((*sharding.axes, axis), (*sharding.axis_sizes, ranks), sizes)
    return sharding


@dataclass(frozen=True)
class StridedDimSharding:
    """One tensor dim that several dims were folded into, each sharded by itself.

    Example: (2, 6), with the second dim sharded over 2 ranks, is folded into one dim of 12. It has
    one level of 2 runs, each sharded as 3 + 3:

        element  0 1 2 | 3 4 5 || 6 7 8 | 9 10 11
        rank       0       1        0       1
    """

    # Pairs (runs, sharding), ascending by runs. The dim consists of `runs` equal runs, and each run
    # is sharded by `sharding`. Shards of a level are whole numbers of the next level's runs.
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
        """The dims that were folded; an unsharded dim is joined to the dim before it."""
        runs = [count for count, _ in self.levels]
        # Example: [1, 2] for 12 elements in 2 runs.
        starts = runs if runs[0] == 1 else [1, *runs]
        # In the example, [1, 2, 12] gives the dims (2, 6).
        counts = [*starts, self.length]
        return tuple(inner // outer for outer, inner in pairwise(counts))

    @cached_property
    def _folded_dims(self) -> list[tuple[int, DimSharding | None]]:
        """The size and the sharding of each dim in `shape`; the sharding is None if unsharded."""
        # Elements of a unit in which each level's sharding is counted.
        # Example: [3, 1] for 12 elements in levels of 1 and 4 runs.
        inner = [self.length // runs for runs, _ in self.levels[1:]]
        inner.append(1)
        shardings: list[DimSharding | None] = []
        if self.levels[0][0] != 1:
            shardings.append(None)
        for (_, sharding), unit in zip(self.levels, inner, strict=True):
            shardings.append(sharding.divided(unit))
        return [*zip(self.shape, shardings, strict=True)]

    def size(self, coordinate: Sequence[int]) -> int:
        """Return the number of elements that the rank at a mesh coordinate holds."""
        sizes = []
        for n, sharding in self._folded_dims:
            sizes.append(n if sharding is None else sharding.size(coordinate))
        return prod(sizes)

    def indices(self, coordinate: Sequence[int]) -> list[int]:
        """Return the global indices of the elements of the rank at a coordinate, in its order."""
        return [i for start, stop in self.intervals(coordinate) for i in range(start, stop)]

    def intervals(self, coordinate: Sequence[int]) -> list[tuple[int, int]]:
        """Return the global `[start, stop)` of every run of the rank at a coordinate, in order."""
        # The runs along the folded dims so far. Example: for all rows and columns 3:6 of (2, 6),
        # they are [(0, 2)] after the rows, then [(3, 6), (9, 12)].
        runs = [(0, 1)]
        for n, sharding in self._folded_dims:
            whole = (0, n)
            start, stop = whole if sharding is None else sharding.interval(coordinate)
            if (start, stop) == whole:
                runs = [(first * n, last * n) for first, last in runs]
            else:
                rows = [row for first, last in runs for row in range(first, last)]
                origins = [row * n for row in rows]
                runs = [(origin + start, origin + stop) for origin in origins]
        return [(start, stop) for start, stop in runs if start < stop]

    def level(self, runs: int) -> DimSharding | None:
        """Return the sharding of the level of `runs` runs; None if there is no such level."""
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


def runs_of(placement: Placement) -> int:
    """Return the number of equal runs of a dim that a placement shards; 1 for a whole dim."""
    return placement.split_factor if isinstance(placement, StridedShard) else 1


AnyDimSharding = DimSharding | StridedDimSharding


def fold_levels(levels: Mapping[int, DimSharding], length: int) -> AnyDimSharding | None:
    """Return the sharding of a dim of `length` elements by `levels`; None if they do not fit.

    `levels` maps a number of runs to the sharding of one run.
    """
    ascending = sorted(levels.items())
    first_runs, first_sharding = ascending[0]
    if len(ascending) == 1 and first_runs == 1:
        return first_sharding
    # Example: for 12 elements in levels of 1 and 4 runs, a run has [12, 3] elements.
    lengths = [length // runs for runs, _ in ascending]
    inner_lengths = [*lengths[1:], 1]
    for (runs, sharding), n, inner in zip(ascending, lengths, inner_lengths, strict=True):
        # Example: shards of 7 and 5 elements are not whole numbers of rows of 3.
        has_whole_rows = sharding.divided(inner) is not None
        if runs * n != length or sharding.length != n or not has_whole_rows:
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
        runs = runs_of(placements[axis])
        by_runs.setdefault(runs, []).append(axis)
    if list(by_runs) == [1]:
        return shard_dim(length, axes, placements, mesh_shape)
    levels: dict[int, DimSharding] = {}
    # A symbol becomes a constant, because folding depends on its divisors.
    length = int(length)
    plain = [Shard(0, sizes=p.sizes) if isinstance(p, StridedShard) else p for p in placements]
    for runs, axes_of_level in by_runs.items():
        # Example: a run of 12 elements in 2 runs has 6, sharded as 3 + 3.
        levels[runs] = shard_dim(length // runs, axes_of_level, plain, mesh_shape)
    sharding = fold_levels(levels, length)
    if sharding is None:
        names = ", ".join(repr(placements[axis]) for axis in axes)
        raise PlacementError(
            f"a dim of {length} elements cannot be sharded by {names}: its runs cannot be divided "
            "into these shards. Pad the dim to a multiple of split_factor, or shard it by "
            "Shard(dim, sizes=...)"
        )
    return sharding
