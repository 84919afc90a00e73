"""How a cut changes when a dim is sliced, selected from, embedded into a longer dim or lengthened.

Each map is a value (hashable, printable) that takes the cut of one dim and gives the cut of another, over the same
mesh axes.  The inverse maps (`Embed`, `Around`) belong to gradients: many cuts of the longer dim fit, and they
prefer the default one, because that is what the forward input most likely had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import ClassVar

from ..chunks import Cut, chunk_sizes
from .rule import OpCall

__all__ = ["Around", "Embed", "Extend", "Owner", "Window", "default_cut", "local_bounds", "owner_of", "window_of"]


@dataclass(frozen=True, slots=True)
class Window:
    """Each piece keeps its elements at `start`, `start + step`, ... below `stop`.

    Example:
        >>> Window(1, 7)(Cut((0,), (2,), (4, 4))).sizes
        (3, 3)
    """

    start: int
    stop: int
    step: int = 1

    def __call__(self, cut: Cut) -> Cut:
        bounds = [self.before(offset) for offset in (*cut.offsets, cut.length)]
        return Cut(cut.axes, cut.axis_sizes, tuple(b - a for a, b in pairwise(bounds)))

    def before(self, position: int) -> int:
        """How many selected elements lie before `position`."""
        return max(0, -(-(min(position, self.stop) - self.start) // self.step))


@dataclass(frozen=True, slots=True)
class Owner:
    """The piece that has element `index` holds all `length` elements of the result, the others none."""

    index: int
    length: int

    def __call__(self, cut: Cut) -> Cut:
        owner = owner_of(cut, self.index)
        sizes = tuple(self.length if piece == owner else 0 for piece in range(len(cut.sizes)))
        return Cut(cut.axes, cut.axis_sizes, sizes)


@dataclass(frozen=True, slots=True)
class Embed:
    """The inverse of `Window(start, ..., step)`: a cut of `length` elements in which each piece keeps what it has."""

    length: int
    start: int
    step: int = 1

    def __call__(self, cut: Cut) -> Cut:
        default = default_cut(self.length, cut)
        window = Window(self.start, self.start + cut.length * self.step, self.step)
        if window(default).sizes == cut.sizes:
            return default
        ends = [*cut.offsets[1:], cut.length]
        bounds = [0, *(self._bound(end, cut.length) for end in ends[:-1]), self.length]
        return Cut(cut.axes, cut.axis_sizes, tuple(b - a for a, b in pairwise(bounds)))

    def _bound(self, elements: int, total: int) -> int:
        """Where the piece ends that ends with the first `elements` of the short dim."""
        if elements in (0, total):
            return 0 if elements == 0 else self.length
        return self.start + elements * self.step


@dataclass(frozen=True, slots=True)
class Around:
    """The inverse of `Owner`: a cut of `length` elements in which the one non-empty piece has element `index`."""

    length: int
    index: int

    def __call__(self, cut: Cut) -> Cut:
        default = default_cut(self.length, cut)
        if cut.sizes[owner_of(default, self.index)]:
            return default
        sizes = tuple(self.length if size else 0 for size in cut.sizes)
        return Cut(cut.axes, cut.axis_sizes, sizes)


@dataclass(frozen=True, slots=True)
class Extend:
    """The dim grows by `before` elements at its start and `after` at its end, which the end pieces take in.

    Where a width is negative, the dim loses as many elements, each piece those that it has of them.
    """

    before: int
    after: int
    alone: ClassVar[bool] = True  # no second operand may be cut along the dim: its pieces would lie beside these

    def __call__(self, cut: Cut) -> Cut:
        kept = Window(max(0, -self.before), cut.length - max(0, -self.after))
        sizes = list(kept(cut).sizes)
        sizes[0] += max(0, self.before)
        sizes[-1] += max(0, self.after)
        return Cut(cut.axes, cut.axis_sizes, tuple(sizes))


def window_of(call: OpCall, length: int) -> Window:
    """The range that `start`, `end` and `step` select of `length` elements, as Python's slices do."""
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(length)
    return Window(start, max(start, stop), step)


def local_bounds(window: Window, offset: int, length: int) -> tuple[int, int, int]:
    """`window` as seen by the piece that starts at `offset` and keeps `length` elements: start, stop, step."""
    if not length:
        return 0, 0, 1
    start = window.start + window.before(offset) * window.step - offset
    return start, start + (length - 1) * window.step + 1, window.step


def owner_of(cut: Cut, index: int) -> int:
    """The piece that has element `index`."""
    return next(piece for piece, end in enumerate(_ends(cut)) if index < end)


def default_cut(length: int, like: Cut) -> Cut:
    """`length` elements, cut over the axes of `like` as `torch.chunk` cuts."""
    pieces: Sequence[int] = (length,)
    for size in like.axis_sizes:
        pieces = [part for whole in pieces for part in chunk_sizes(whole, size)]
    assert len(pieces) == prod(like.axis_sizes), "one piece per coordinate of the axes"
    return Cut(like.axes, like.axis_sizes, tuple(pieces))


def _ends(cut: Cut) -> list[int]:
    return [*cut.offsets[1:], cut.length]
