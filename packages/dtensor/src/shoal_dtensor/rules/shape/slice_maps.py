"""How the sharding of a dim changes when it is sliced, selected from, padded, or when such a result gets its gradient.

Each map is a value (hashable, printable) that takes the sharding of one dim and gives the sharding of another, over the
same mesh axes.  `x[1:7]` of 8 elements on 2 ranks: shards of 4 and 4 keep 3 and 3.  The maps of gradients are inverse:
many shardings of the longer dim fit, and they prefer that of `torch.chunk`, which the forward input most likely had.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from shoal_mesh.internal import dataclass

from ...layout.dim_sharding import DimSharding
from ..language.rule import OpCall


@dataclass(frozen=True, slots=True)
class SliceMap:
    """Each shard keeps its elements at `start`, `start + step`, ... below `stop`.

    Example:
        >>> SliceMap(1, 7)(DimSharding((0,), (2,), (4, 4))).sizes
        (3, 3)
    """

    start: int
    stop: int
    step: int = 1

    def __call__(self, sharding: DimSharding) -> DimSharding:
        if sharding.ragged is None and 0 <= self.start < self.step and sharding.step % self.step == 0:
            length, step = self.before(sharding.length), sharding.step // self.step  # x[::2] of 4 + 4: 2 + 2
            return DimSharding.chunks(sharding.axes, sharding.axis_sizes, length, step)
        bounds = [self.before(offset) for offset in (*sharding.offsets, sharding.length)]
        return DimSharding(sharding.axes, sharding.axis_sizes, tuple(b - a for a, b in pairwise(bounds)))

    def before(self, position: int) -> int:
        """How many selected elements are before `position`."""
        return max(0, -(-(min(position, self.stop) - self.start) // self.step))

    def count(self, start: int, length: int) -> int:
        """How many selected elements are among `length` from `start` on."""
        return self.before(start + length) - self.before(start)


@dataclass(frozen=True, slots=True)
class SelectMap:
    """The shard that has element `index` holds all `length` elements of the result, the others none."""

    index: int
    length: int

    def __call__(self, sharding: DimSharding) -> DimSharding:
        owner = sharding.shard_with(self.index)
        sizes = tuple(self.length if shard == owner else 0 for shard in range(sharding.shards))
        return DimSharding(sharding.axes, sharding.axis_sizes, sizes)


@dataclass(frozen=True, slots=True)
class SliceGradMap:
    """The inverse of `SliceMap(start, ..., step)`: each shard of `length` elements has what it had of the slice."""

    length: int
    start: int
    step: int = 1

    def __call__(self, sharding: DimSharding) -> DimSharding:
        default = chunk_sharding(self.length, sharding)
        selected = SliceMap(self.start, self.start + sharding.length * self.step, self.step)
        if selected(default) == sharding:
            return default
        ends = [*sharding.offsets[1:], sharding.length]
        bounds = [0, *(self._bound(end, sharding.length) for end in ends[:-1]), self.length]
        return DimSharding(sharding.axes, sharding.axis_sizes, tuple(b - a for a, b in pairwise(bounds)))

    def _bound(self, elements: int, total: int) -> int:
        """Where the shard ends that ends with the first `elements` of the slice."""
        if elements in (0, total):
            return 0 if elements == 0 else self.length
        return self.start + elements * self.step


@dataclass(frozen=True, slots=True)
class SelectGradMap:
    """The inverse of `SelectMap`: of `length` elements, the one non-empty shard has element `index`."""

    length: int
    index: int

    def __call__(self, sharding: DimSharding) -> DimSharding:
        default = chunk_sharding(self.length, sharding)
        start, stop = sharding.interval_of(default.shard_with(self.index))
        if start < stop:
            return default
        sizes = tuple(self.length if size else 0 for size in sharding.sizes)
        return DimSharding(sharding.axes, sharding.axis_sizes, sizes)


@dataclass(frozen=True, slots=True)
class PadMap:
    """The dim grows by `before` elements at its start and `after` at its end, which belong to the first and last shard.

    Where a width is negative, the dim loses as many elements, each shard those that it has of them.
    """

    before: int
    after: int
    exclusive: ClassVar[bool] = (
        True  # no second operand may be sharded along the dim: its shards would be next to these
    )

    def __call__(self, sharding: DimSharding) -> DimSharding:
        kept = SliceMap(max(0, -self.before), sharding.length - max(0, -self.after))
        sizes = list(kept(sharding).sizes)
        sizes[0] += max(0, self.before)
        sizes[-1] += max(0, self.after)
        return DimSharding(sharding.axes, sharding.axis_sizes, tuple(sizes))


def slice_map(call: OpCall, length: int) -> SliceMap:
    """The range that `start`, `end` and `step` select of `length` elements, as Python's slices do."""
    start, stop = _clamped(call["start"], 0, length), _clamped(call["end"], length, length)
    return SliceMap(start, max(start, stop), call["step"])


def _clamped(position: int | None, default: int, length: int) -> int:
    """A position among `length` elements; computed, not asked of `slice.indices`, which takes no symbols."""
    if position is None:
        return default
    return min(max(position + length, 0) if position < 0 else position, length)


def local_bounds(selected: SliceMap, offset: int, length: int) -> tuple[int, int, int]:
    """The slice as the shard sees it that starts at `offset` and keeps `length` elements: start, stop, step."""
    if not length:
        return 0, 0, 1
    start = selected.start + selected.before(offset) * selected.step - offset
    return start, start + (length - 1) * selected.step + 1, selected.step


def chunk_sharding(length: int, like: DimSharding) -> DimSharding:
    """`length` elements, sharded over the axes of `like` in the sizes of `torch.chunk`."""
    sharding = DimSharding.chunks((), (), length, length)
    for axis, ways in zip(like.axes, like.axis_sizes, strict=True):
        sharding = sharding.chunked(axis, ways)
    return sharding
