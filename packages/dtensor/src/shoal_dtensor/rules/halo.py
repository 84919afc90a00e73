"""Windows that slide along a cut dim: which outputs a piece makes, and the border rows that it needs of the others.

One exchange with exact blocks brings a rank what its windows read and it does not hold; the gradient of those rows
goes back the same way and is added to the owners' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from shoal_mesh import all_to_all_v

from ..chunks import Cut
from ..spec import Spec

__all__ = ["Halo", "Interval", "Sliding", "Windows", "narrowed", "widened"]

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sliding:
    """Output `o` reads inputs `o * stride - padding + dilation * j` for `j` below `kernel`.

    As a map of cuts: each piece of the input makes the outputs in whose windows' middle it lies.

    Attributes:
        length: of the input.
        made: outputs.

    Example:
        >>> Sliding(8, 8, kernel=3, padding=1)(Cut((0,), (2,), (5, 3))).sizes
        (5, 3)
    """

    length: int
    made: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def __call__(self, cut: Cut) -> Cut:
        bounds = [*map(self._before, cut.offsets), self.made]
        bounds[0] = 0
        return Cut(cut.axes, cut.axis_sizes, tuple(b - a for a, b in pairwise(bounds)))

    def _before(self, position: int) -> int:
        """How many outputs belong to the inputs before `position`."""
        if position >= self.length:
            return self.made
        middle = self.dilation * (self.kernel - 1) // 2 - self.padding
        return min(max(-(-(position - middle) // self.stride), 0), self.made) if position else 0

    def reads(self, outputs: Interval) -> Interval:
        """What the windows of a range of outputs read; it may reach over both ends of the input."""
        first, last = outputs[0], outputs[1] - 1
        if last < first:
            return 0, 0
        reach = self.dilation * (self.kernel - 1)
        return first * self.stride - self.padding, last * self.stride - self.padding + reach + 1

    @property
    def overlap(self) -> int:
        """Inputs that two neighbouring windows share, so about what a piece needs of others."""
        return max(self.dilation * (self.kernel - 1) + 1 - self.stride, 0)


class Windows(Protocol):
    """Which outputs a piece makes, as a map of cuts, and what a range of outputs reads of `length` inputs."""

    @property
    def length(self) -> int: ...
    def __call__(self, cut: Cut) -> Cut: ...
    def reads(self, outputs: Interval) -> Interval: ...


@dataclass(frozen=True, slots=True)
class Halo:
    """One cut dim of an input whose outputs are computed where `sliding` says.

    Attributes:
        spec: of the input.
        dim: the dim.
        sliding: its windows.
    """

    spec: Spec
    dim: int
    sliding: Windows

    @property
    def _cut(self) -> Cut:
        cut = self.spec.cuts[self.dim]
        assert isinstance(cut, Cut), "windows slide along pieces in a row"
        return cut

    @property
    def _me(self) -> int:
        return self._cut.index(self.spec.coordinate or (0,) * self.spec.mesh.ndim)

    def _wanted(self) -> list[Interval]:
        """What each piece reads of the input."""
        length = self.sliding.length
        reads = [self.sliding.reads(outputs) for outputs in _intervals(self.sliding(self._cut))]
        return [(min(max(a, 0), length), max(min(b, length), 0)) for a, b in reads]

    def widened(self) -> Interval:
        """What this rank's windows read; it may reach over both ends of the input."""
        return self.sliding.reads(_intervals(self.sliding(self._cut))[self._me])

    def makes(self) -> int:
        """How many outputs this rank makes."""
        return self.sliding(self._cut).sizes[self._me]

    def margins(self) -> tuple[int, int]:
        """How far this rank's windows reach over the ends of the input."""
        first, last = self.widened()
        return max(0, min(last, 0) - first), max(0, last - max(first, self.sliding.length))

    def fetched(self, x: Tensor) -> Tensor:
        """What this rank's windows read of the input, `x` being its piece."""
        held, wanted, me = _intervals(self._cut), self._wanted(), self._me
        if all(_common(h, w) == w or w[0] == w[1] for h, w in zip(held, wanted, strict=True)):
            return _part(x, self.dim, wanted[me], held[me][0])
        given = [_part(x, self.dim, _common(held[me], w), held[me][0]) for w in wanted]
        blocks = self._exchanged(given, [_common(h, wanted[me]) for h in held])
        return torch.cat(blocks, self.dim)

    def returned(self, gradient: Tensor) -> Tensor:
        """The gradient of this rank's piece out of the gradients of what every rank fetched."""
        held, wanted, me = _intervals(self._cut), self._wanted(), self._me
        mine, base = held[me], wanted[me][0]
        shape = [mine[1] - mine[0] if d == self.dim else n for d, n in enumerate(gradient.shape)]
        total = gradient.new_zeros(shape)
        given = [_part(gradient, self.dim, _common(h, wanted[me]), base) for h in held]
        if all(_common(h, w) == w or w[0] == w[1] for h, w in zip(held, wanted, strict=True)):
            blocks = [block if piece == me else None for piece, block in enumerate(given)]
        else:
            blocks = [*self._exchanged(given, [_common(mine, w) for w in wanted])]
        for block, want in zip(blocks, wanted, strict=True):
            start, stop = _common(mine, want)
            if block is not None and stop > start:
                total.narrow(self.dim, start - mine[0], stop - start).add_(block)
        return total

    def _exchanged(self, given: Sequence[Tensor], expected: Sequence[Interval]) -> list[Tensor]:
        """Everybody's block for this rank; its own stays where it is."""
        me, like = self._me, given[0]
        rest = prod(n for d, n in enumerate(like.shape) if d != self.dim)
        sent = [0 if piece == me else block.numel() for piece, block in enumerate(given)]
        awaited = [0 if piece == me else (b - a) * rest for piece, (a, b) in enumerate(expected)]
        flat = torch.cat([block.reshape(-1) for piece, block in enumerate(given) if piece != me])
        got = torch.split(all_to_all_v(flat, self.spec.mesh.comm(self._cut.axes), sent, awaited), awaited)
        blocks = []
        for piece, (block, (start, stop)) in enumerate(zip(got, expected, strict=True)):
            shape = [stop - start if d == self.dim else n for d, n in enumerate(like.shape)]
            blocks.append(given[me] if piece == me else block.view(shape))
        return blocks


def widened(x: Tensor, halos: Sequence[Halo], fill: float = 0.0) -> Tensor:
    """This rank's piece with the border rows of others, and `fill` beyond the ends of the input."""
    widths = [0] * (2 * x.ndim)
    for halo in halos:
        x = halo.fetched(x)
        at = 2 * (x.ndim - 1 - halo.dim)
        widths[at : at + 2] = halo.margins()
    return torch.constant_pad_nd(x, widths, fill) if any(widths) else x


def narrowed(gradient: Tensor, halos: Sequence[Halo]) -> Tensor:
    """The gradient of this rank's piece, out of that of the widened ones."""
    for halo in reversed(halos):
        before, after = halo.margins()
        gradient = gradient.narrow(halo.dim, before, gradient.shape[halo.dim] - before - after)
        gradient = halo.returned(gradient)
    return gradient


def _intervals(cut: Cut) -> list[Interval]:
    return [(start, start + size) for start, size in zip(cut.offsets, cut.sizes, strict=True)]


def _common(one: Interval, other: Interval) -> Interval:
    """What two ranges share; an empty range where they share nothing."""
    start = min(max(one[0], other[0]), one[1])
    return start, max(start, min(one[1], other[1]))


def _part(x: Tensor, dim: int, interval: Interval, base: int) -> Tensor:
    """A range of positions out of a tensor that starts at position `base`."""
    size = interval[1] - interval[0]
    return x.narrow(dim, interval[0] - base, size) if size else x.narrow(dim, 0, 0)
