"""Halos: the border rows of other ranks that windows sliding along a sharded dim read.

A convolution of 8 rows with kernel 3 and padding 1, sharded as 4 + 4 on 2 ranks (`-` is padding):

    rank 0 holds  0 1 2 3        computes outputs 0..3, reads  - 0 1 2 3 4    row 4 is its halo, from rank 1
    rank 1 holds  4 5 6 7        computes outputs 4..7, reads  3 4 5 6 7 -    row 3 is its halo, from rank 0

One exchange with exact blocks fetches the halo.  The gradient of those rows goes back the same way and is added to the
owner's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from shoal_mesh import all_to_all_blocks
from shoal_mesh.internal import dataclass

from ...layout.dim_sharding import DimSharding
from ...layout.spec import Spec
from ..language.rows import Traffic

Interval = tuple[int, int]


class Windows(Hashable, Protocol):
    """Which outputs a shard computes, as a map of shardings, and what a range of outputs reads of `length` inputs."""

    @property
    def length(self) -> int: ...
    @property
    def overlap(self) -> int: ...
    def __call__(self, sharding: DimSharding) -> DimSharding: ...
    def reads(self, outputs: Interval) -> Interval: ...


@dataclass(frozen=True, slots=True)
class SlidingWindows:
    """Output `o` reads inputs `o * stride - padding + dilation * j` for `j` below `kernel`.

    As a map of shardings: each shard of the input computes the outputs whose windows have their middle in it.

    Attributes:
        length: how many inputs.
        outputs: how many outputs.

    Example:
        >>> SlidingWindows(8, 8, kernel=3, padding=1)(DimSharding((0,), (2,), (5, 3))).sizes
        (5, 3)
    """

    length: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def __call__(self, sharding: DimSharding) -> DimSharding:
        bounds = [*map(self._before, sharding.offsets), self.outputs]
        bounds[0] = 0
        return DimSharding(sharding.axes, sharding.axis_sizes, tuple(b - a for a, b in pairwise(bounds)))

    def _before(self, position: int) -> int:
        """How many outputs belong to the inputs before `position`."""
        if position >= self.length:
            return self.outputs
        middle = self.dilation * (self.kernel - 1) // 2 - self.padding
        return min(max(-(-(position - middle) // self.stride), 0), self.outputs) if position else 0

    def reads(self, outputs: Interval) -> Interval:
        """What the windows of a range of outputs read; it may reach over both ends of the input."""
        first, last = outputs[0], outputs[1] - 1
        if last < first:
            return 0, 0
        reach = self.dilation * (self.kernel - 1)
        return first * self.stride - self.padding, last * self.stride - self.padding + reach + 1

    @property
    def overlap(self) -> int:
        """Inputs that two neighbouring windows share, so about the size of a halo."""
        return max(self.dilation * (self.kernel - 1) + 1 - self.stride, 0)


def halo_traffic(windows: Windows, row_bytes: int) -> Traffic | None:
    """The traffic of windows along a sharded dim; None where they need no halo, however the dim is sharded.

    Args:
        windows: the windows.
        row_bytes: of one position of the dim.

    Example:
        Windows of 2 that do not overlap, of 4 inputs: sharded as 3 + 1 the second one needs an input of the first rank.

        >>> halo_traffic(SlidingWindows(4, 4, kernel=1), 8) is None
        True
        >>> halo_traffic(SlidingWindows(4, 2, kernel=2, stride=2), 8)(4)
        8
    """
    size = max(windows.overlap, 1) * max(row_bytes, 1)
    return (lambda ranks: size) if _needs_halo(windows) else None


@lru_cache(maxsize=4096)
def _needs_halo(windows: Windows) -> bool:
    """Whether two shards, with the border somewhere, read of each other; more shards read no less."""
    borders = range(1, windows.length)
    return any(_reads_others(windows, DimSharding((0,), (2,), (at, windows.length - at))) for at in borders)


def _reads_others(windows: Windows, sharding: DimSharding) -> bool:
    """Whether any shard reads what it does not hold."""
    pairs = zip(_intervals(sharding), _intervals(windows(sharding)), strict=True)
    reads = ((held, _clipped(windows.reads(outputs), windows.length)) for held, outputs in pairs)
    return any(wanted[0] < wanted[1] and _common(held, wanted) != wanted for held, wanted in reads)


@dataclass(frozen=True, slots=True)
class Halo:
    """One sharded dim of an input, and the windows that slide along it.

    Attributes:
        spec: of the input.
        dim: the dim.
        windows: its windows.
    """

    spec: Spec
    dim: int
    windows: Windows

    @property
    def _sharding(self) -> DimSharding:
        return self.spec.dim_sharding(self.dim)

    @property
    def _index(self) -> int:
        return self._sharding.index(self.spec.coordinate or (0,) * self.spec.mesh.ndim)

    @property
    def outputs(self) -> int:
        """How many outputs this rank computes."""
        return self.windows(self._sharding).sizes[self._index]

    @property
    def reads(self) -> Interval:
        """What this rank's windows read; it may reach over both ends of the input."""
        return self.windows.reads(_intervals(self.windows(self._sharding))[self._index])

    @property
    def margins(self) -> tuple[int, int]:
        """How far this rank's windows reach over the ends of the input."""
        first, last = self.reads
        return max(0, min(last, 0) - first), max(0, last - max(first, self.windows.length))

    def _wanted(self) -> list[Interval]:
        """What each shard's windows read of the input."""
        outputs = _intervals(self.windows(self._sharding))
        return [_clipped(self.windows.reads(each), self.windows.length) for each in outputs]

    def fetch(self, x: Tensor) -> Tensor:
        """What this rank's windows read of the input, `x` being its shard."""
        held, wanted, me = _intervals(self._sharding), self._wanted(), self._index
        if not _reads_others(self.windows, self._sharding):
            return _rows(x, self.dim, wanted[me], held[me][0])
        result = x.new_empty(self._resized(x, wanted[me]))
        blocks = [[_rows(x, self.dim, _common(held[me], w), held[me][0])] for w in wanted]
        out = [[_rows(result, self.dim, _common(h, wanted[me]), wanted[me][0])] for h in held]
        all_to_all_blocks(blocks, self.spec.mesh.comm(self._sharding.axes), out)
        return result

    def return_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of this rank's shard out of the gradients of what every rank fetched."""
        held, wanted, me = _intervals(self._sharding), self._wanted(), self._index
        total = gradient.new_zeros(self._resized(gradient, held[me]))
        own = _common(held[me], wanted[me])
        _rows(total, self.dim, own, held[me][0]).copy_(_rows(gradient, self.dim, own, wanted[me][0]))
        if not _reads_others(self.windows, self._sharding):
            return total
        nothing = (held[me][0], held[me][0])
        sends = [nothing if i == me else _common(h, wanted[me]) for i, h in enumerate(held)]
        receives = [nothing if i == me else _common(held[me], w) for i, w in enumerate(wanted)]
        blocks = [[_rows(gradient, self.dim, each, wanted[me][0])] for each in sends]
        out = [[gradient.new_empty(self._resized(gradient, each))] for each in receives]
        all_to_all_blocks(blocks, self.spec.mesh.comm(self._sharding.axes), out)
        for each, (block,) in zip(receives, out, strict=True):
            _rows(total, self.dim, each, held[me][0]).add_(block)
        return total

    def _resized(self, like: Tensor, interval: Interval) -> list[int]:
        return [interval[1] - interval[0] if d == self.dim else n for d, n in enumerate(like.shape)]


def with_halos(x: Tensor, halos: Sequence[Halo], fill: float = 0.0) -> Tensor:
    """This rank's shard with the border rows of others, and `fill` beyond the ends of the input."""
    widths = [0] * (2 * x.ndim)
    for halo in halos:
        x = halo.fetch(x)
        at = 2 * (x.ndim - 1 - halo.dim)  # `constant_pad_nd` counts dims from the last
        widths[at : at + 2] = halo.margins
    return torch.constant_pad_nd(x, widths, fill) if any(widths) else x


def without_halos(gradient: Tensor, halos: Sequence[Halo]) -> Tensor:
    """The gradient of this rank's shard, out of that of what `with_halos` returns."""
    for halo in reversed(halos):
        before, after = halo.margins
        gradient = gradient.narrow(halo.dim, before, gradient.shape[halo.dim] - before - after)
        gradient = halo.return_gradient(gradient)
    return gradient


def _intervals(sharding: DimSharding) -> list[Interval]:
    return [(start, start + size) for start, size in zip(sharding.offsets, sharding.sizes, strict=True)]


def _clipped(interval: Interval, length: int) -> Interval:
    """What a range has of 0..length."""
    return min(max(interval[0], 0), length), max(min(interval[1], length), 0)


def _common(one: Interval, other: Interval) -> Interval:
    """What two ranges share; an empty range where they share nothing."""
    start = min(max(one[0], other[0]), one[1])
    return start, max(start, min(one[1], other[1]))


def _rows(x: Tensor, dim: int, interval: Interval, base: int) -> Tensor:
    """A range of positions out of a tensor that starts at position `base`."""
    size = interval[1] - interval[0]
    return x.narrow(dim, interval[0] - base, size) if size else x.narrow(dim, 0, 0)
