"""How one tensor dim is sharded over mesh axes: integers only.

A `DimSharding` lists the mesh axes that shard the dim, outermost first, and says where every shard begins and ends.
Whatever the sharding (nested, uneven, ragged, any order of axes), shard `k` is one contiguous interval, so every rank
holds one box of the global tensor.  Redistribution, random numbers, checkpoints and views all build on that.

Shards of `torch.chunk` are two integers, length and step, for any number of ranks: shard `k` is
`[k * step, (k + 1) * step)`, as far as the dim reaches.  Only ragged shardings have an entry per shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain
from math import prod

from shoal_mesh.internal import constant_when_compiled

from ..errors import PlacementError
from .placements import Placement, Shard, StridedShard

ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]


def chunk_sizes(length: int, shards: int, unit: int = 1) -> tuple[int, ...]:
    """Sizes of the `shards` that `torch.chunk` makes of `length` elements, divided only at multiples of `unit`.

    Trailing shards are smaller, or empty when there are fewer units than shards: 10 over 4 are (3, 3, 3, 1), and 2 over
    4 are (1, 1, 0, 0).
    """
    return _sizes(length, _step(length, shards, unit), shards)


def shard_sizes(size: int, placement: Shard | StridedShard, ranks: int) -> list[int]:
    """Elements of a dim on each rank of an axis.

    Example:
        >>> shard_sizes(10, Shard(0, multiple_of=2), 4)
        [4, 4, 2, 0]
    """
    if isinstance(placement, StridedShard):
        assert placement.sizes is not None, "styles say the sizes of strided shards"
        return [placement.split_factor * size for size in placement.sizes]  # 3 runs, each as 2 + 1: 6 + 3
    return list(placement.sizes or chunk_sizes(size, ranks, placement.multiple_of))


def _step(length: int, shards: int, unit: int) -> int:
    """Elements of the first shard: ceil-sized in units of `unit`."""
    units = -(-length // unit)  # 10 elements in units of 4: 3
    return -(-units // shards) * unit  # 3 units over 2 shards: 2 * 4 = 8 elements


def _sizes(length: int, step: int, shards: int) -> tuple[int, ...]:
    """Sizes of the shards: as many of `step` as there are, the rest, and empty ones.

    7 elements, step 3, 4 shards: (3, 3, 1, 0)
    """
    full = int(length // step) if step else 0
    return ((step,) * full + (length - full * step, *(0,) * shards))[:shards]  # (3, 3) + (1, 0, 0, 0, 0), up to 4


@constant_when_compiled
@dataclass(frozen=True, init=False)
class DimSharding:
    """One tensor dim, sharded over mesh axes.

    7 elements over axes (0, 1) of sizes (2, 2): shard k = 2 * coordinate[0] + coordinate[1]

        element     0 1 | 2 3 || 4 5 | 6
        coordinate  0,0   0,1    1,0   1,1

    It is made of the sizes of all shards, row-major over the axes: (2, 2, 2, 1), which are steps of 2, not ragged.
    """

    axes: tuple[int, ...]  # mesh axes that shard the dim, outermost first; empty when it is replicated
    axis_sizes: tuple[int, ...]
    length: int  # global number of elements
    step: int  # elements of the longest shard
    ragged: tuple[int, ...] | None  # elements of every shard where those are not `step` up to the end; None otherwise
    # number of shards, empty ones too
    shards: int = field(default=1, compare=False, repr=False)  # compiled code reads what the class itself has
    even: bool = field(default=True, compare=False, repr=False)  # whether all shards are equally large

    def __init__(self, axes: tuple[int, ...], axis_sizes: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        assert len(sizes) == prod(axis_sizes), "one size for each coordinate of the axes"
        sizes = tuple(map(int, sizes))  # symbols are for even shards
        length, step = sum(sizes), sizes[0]
        ragged = None if sizes == _sizes(length, step, len(sizes)) else sizes  # None for (3, 3, 1); not for (1, 3, 3)
        self._set(axes, axis_sizes, length, step if ragged is None else max(sizes), ragged)

    @classmethod
    def chunks(cls, axes: tuple[int, ...], axis_sizes: tuple[int, ...], length: int, step: int) -> DimSharding:
        """The sharding in shards of `step` elements, the last non-empty one shorter: 5 in steps of 2 are 2, 2, 1."""
        sharding: DimSharding = object.__new__(cls)
        sharding._set(axes, axis_sizes, length, min(step, length), None)
        return sharding

    @staticmethod
    def whole(length: int) -> DimSharding:
        """That of a dim of which every rank has all."""
        return _whole(length, length) if type(length) is int else DimSharding.chunks((), (), length, length)

    def _set(
        self, axes: tuple[int, ...], axis_sizes: tuple[int, ...], length: int, step: int, ragged: tuple[int, ...] | None
    ) -> None:
        shards = prod(axis_sizes)
        even = ragged is None and bool(step * shards == length)  # 4 shards of 2 are 8, not 7
        self.__dict__.update(
            axes=axes, axis_sizes=axis_sizes, length=length, step=step, ragged=ragged, shards=shards, even=even
        )

    def __hash__(self) -> int:  # lengths may be symbols, which have none
        return hash((self.axes, self.axis_sizes, self.ragged))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of every shard: an entry per rank of the axes, so ask for one interval where that will do."""
        return _sizes(self.length, self.step, self.shards) if self.ragged is None else self.ragged

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Global index of the first element of every shard."""
        return (0, *accumulate(self.sizes[:-1]))

    def index(self, coordinate: Sequence[int]) -> int:
        """The shard that the rank at a mesh coordinate holds."""
        shard = 0
        for axis, size in zip(self.axes, self.axis_sizes, strict=True):
            shard = shard * size + coordinate[axis]  # coordinate (1, 1) on (2, 2): 1, then 1 * 2 + 1 = 3
        return shard

    def interval_of(self, shard: int) -> tuple[int, int]:
        """Global `[start, stop)` of a shard."""
        if self.ragged is None:
            start = shard and min(shard * self.step, self.length)  # 0 times a symbol is a symbol
            return start, min((shard + 1) * self.step, self.length)  # 7 in steps of 2: shard 3 is (6, 7)
        start = self.offsets[shard]
        return start, start + self.ragged[shard]  # (1, 3, 3): shard 1 is (1, 4)

    def interval(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """Global `[start, stop)` that the rank at a mesh coordinate holds."""
        return self.interval_of(self.index(coordinate))

    def intervals(self, coordinate: Sequence[int]) -> list[tuple[int, int]]:
        """The same in a list, which has several of a `StridedDimSharding`."""
        return [self.interval(coordinate)]

    def size(self, coordinate: Sequence[int]) -> int:
        """Number of elements that the rank at a mesh coordinate holds."""
        if self.even:
            return self.step
        start, stop = self.interval(coordinate)
        return stop - start

    def indices(self, coordinate: Sequence[int]) -> list[int]:
        """Global indices of the elements that the rank at a mesh coordinate holds."""
        return [*range(*self.interval(coordinate))]

    def shard_with(self, index: int) -> int:
        """The shard that has element `index`, which is below the length."""
        return index // self.step if self.ragged is None else bisect_right(self.offsets, index) - 1

    def scaled(self, unit: int) -> DimSharding:
        """The same sharding where every element became `unit` elements."""
        if unit == 1:
            return self
        if self.ragged is None:
            return DimSharding.chunks(self.axes, self.axis_sizes, self.length * unit, self.step * unit)
        return DimSharding(self.axes, self.axis_sizes, tuple(size * unit for size in self.ragged))  # (1, 3) * 2: (2, 6)

    def divided(self, unit: int) -> DimSharding | None:
        """The same sharding counted in units of `unit` elements; None if a shard is not a whole number of units."""
        if unit == 1:
            return self
        if self.ragged is None:
            if self.step % unit or self.length % unit:  # 12 in steps of 6, in units of 4: 6 % 4 = 2
                return None
            return DimSharding.chunks(self.axes, self.axis_sizes, self.length // unit, self.step // unit)
        if any(size % unit for size in self.ragged):
            return None
        return DimSharding(self.axes, self.axis_sizes, tuple(size // unit for size in self.ragged))

    def outer(self, count: int) -> DimSharding:
        """The sharding by the `count` outermost axes alone."""
        if count == len(self.axes):
            return self
        if not count:
            return DimSharding.whole(self.length)
        axes, axis_sizes, inner = self.axes[:count], self.axis_sizes[:count], prod(self.axis_sizes[count:])
        if self.ragged is None:
            return DimSharding.chunks(axes, axis_sizes, self.length, self.step * inner)  # 2, 2, 2, 1 by the outer: 4, 3
        starts = range(0, self.shards, inner)  # (2, 2, 2, 1) over (2, 2), by the outer axis: (2 + 2, 2 + 1)
        return DimSharding(axes, axis_sizes, tuple(sum(self.ragged[i : i + inner]) for i in starts))

    def chunked(self, axis: int, ways: int, unit: int = 1) -> DimSharding:
        """Every shard sharded further by one more axis, as `torch.chunk` does it at multiples of `unit`.

        7 elements over (2, 2): shards of 4 and 3, both in steps of 2, so every boundary is a multiple of 2.
        10 elements: shards of 5 in steps of 3, with boundaries at 0, 3, 5 and 8, which is ragged.
        """
        axes, axis_sizes = (*self.axes, axis), (*self.axis_sizes, ways)
        if type(self.length) is not int:  # a symbol stays one where the shards are even
            if self.even and not self.step % (ways * unit):
                return DimSharding.chunks(axes, axis_sizes, self.length, self.step // ways)
            return DimSharding(self.axes, self.axis_sizes, self.sizes).chunked(axis, ways, unit)
        if self.ragged is None:
            step, last = _step(self.step, ways, unit), self.length % self.step if self.step else 0
            aligned = self.step == self.length or step * ways == self.step  # steps of 4, then 2: 2 * 2 == 4
            if aligned and (not last or min(_step(last, ways, unit), last) == min(step, last)):
                return DimSharding.chunks(axes, axis_sizes, self.length, step)
        inner = {size: chunk_sizes(size, ways, unit) for size in {*self.sizes}}  # of thousands of shards few differ
        return DimSharding(axes, axis_sizes, tuple(chain.from_iterable([inner[size] for size in self.sizes])))

    def rechunked(self, length: int) -> DimSharding:
        """`length` elements, sharded over the same axes in the sizes of `torch.chunk`."""
        sharding = DimSharding.whole(length)
        for axis, ways in zip(self.axes, self.axis_sizes, strict=True):
            sharding = sharding.chunked(axis, ways)
        return sharding

    def placements(self, dim: int, *, explicit: bool = False) -> dict[int, Shard]:
        """The placement on tensor dim `dim` that each of the axes has: sizes where needed, or `explicit`."""
        if self.even and not explicit:
            return dict.fromkeys(self.axes, Shard(dim))
        placements: dict[int, Shard] = {}
        here = self.outer(0)
        for count, (axis, ways) in enumerate(zip(self.axes, self.axis_sizes, strict=True), 1):
            default, here = here.chunked(axis, ways), self.outer(count)
            placements[axis] = Shard(dim, sizes=here.sizes) if explicit or here != default else Shard(dim)
        return placements


_whole = lru_cache(maxsize=4096)(partial(DimSharding.chunks, (), ()))


def shard_dim(
    length: int, axes: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> DimSharding:
    """The sharding of a dim of `length` elements by `axes`, outermost first, with their `Shard` placements.

    PlacementError if explicit sizes do not add up to what the outer axes leave.
    """
    sharding = DimSharding.whole(length)
    for axis in axes:
        placement, ways = placements[axis], mesh_shape[axis]
        assert isinstance(placement, Shard), "only Shard placements shard a dim"
        if placement.sizes is None:
            sharding = sharding.chunked(axis, ways, placement.multiple_of)
            continue
        sizes, shards = placement.sizes, sharding.sizes
        sums = tuple([sum(sizes[i : i + ways]) for i in range(0, len(sizes), ways)])  # (3, 1, 2, 2) inside of 4 + 4
        if len(sizes) != len(shards) * ways or sums != shards:
            raise PlacementError(
                f"{placement!r} on mesh axis {axis}: expected {len(shards) * ways} sizes, {ways} for each shard "
                f"that the outer axes make, which add up to {shards}, got {len(sizes)} that add up to {sums}"
            )
        sharding = DimSharding((*sharding.axes, axis), (*sharding.axis_sizes, ways), sizes)
    return sharding
