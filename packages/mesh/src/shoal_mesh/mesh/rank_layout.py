"""Which rank is at which coordinate of a grid: sizes and strides of plain integers.

A layout maps a coordinate to one integer: an offset plus, per axis, index times stride. An axis may have several
modes - (size, stride) pairs, outermost first - because flattening two axes that are not adjacent in memory gives one
axis with two strides: the axes 0 and 2 of a 2x3x4 grid have strides 12 and 1, flattened ((2, 12), (4, 1)). So a mesh
over 16,384 ranks takes as much memory as one over four, and slicing, flattening and splitting are arithmetic. Nothing
here depends on torch, processes or names. The integer is the global rank, unless a mesh was given irregular ranks: then
it is a position in the list of them, which the layout has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..argument_types import kind_of
from ..errors import MeshError, MeshTypeError

if TYPE_CHECKING:
    from ..groups.process_groups import BackendChoice, Comm

Axis = tuple[tuple[int, int], ...]  # modes (size, stride), outermost first; () is an axis of size 1


def coalesce(modes: Sequence[tuple[int, int]]) -> Axis:
    """The shortest axis that lists the same integers: modes of size 1 dropped, mergeable neighbours merged."""
    merged: list[tuple[int, int]] = []
    for size, stride in modes:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)  # (2, 4), (4, 1): 4 == 4 * 1, so (8, 1)
        else:
            merged.append((size, stride))
    return tuple(merged)


def read_sizes(values: Iterable[int], name: str) -> tuple[int, ...]:
    """Integers in an order, as a tuple; MeshTypeError for anything else."""
    if not isinstance(values, str | bytes | Set | Mapping):
        with suppress(TypeError, RuntimeError):  # RuntimeError: torch's own mesh
            return tuple(map(index, values))
    raise MeshTypeError(f"{name} is a sequence of int, got {kind_of(values)}")


def axis_members(axis: Axis) -> list[int]:
    """The offset of every position on an axis."""
    offsets = [0]
    for size, stride in axis:  # ((2, 12), (4, 1)): 0, 12 -> 0, 1, 2, 3, 12, 13, 14, 15
        offsets = [base + i * stride for base in offsets for i in range(size)]
    return offsets


def axis_offset(axis: Axis, index: int) -> int:
    """The offset of one position on an axis."""
    total = 0
    for size, stride in reversed(axis):  # ((2, 12), (4, 1)), index 6 = 1 * 4 + 2: 2 * 1 + 1 * 12 = 14
        index, i = divmod(index, size)
        total += i * stride
    return total


def fit_axis(offsets: Sequence[int]) -> Axis | None:
    """The axis with these offsets (the first is 0), or None when no strides give them."""
    modes: list[tuple[int, int]] = []
    rest = list(offsets)
    # 0 1 2 3 12 13 14 15: a run of 4 with stride 1, which leaves 0 12: a run of 2 with stride 12.
    while len(rest) > 1:
        stride = rest[1]
        run = next((i for i, value in enumerate(rest) if value != i * stride), len(rest))  # 0 1 2 3 | 12: 4
        if len(rest) % run:
            return None
        modes.append((run, stride))
        rest = rest[::run]  # every 4th: 0 12
    axis = tuple(reversed(modes))
    return axis if axis_members(axis) == list(offsets) else None


@dataclass(frozen=True)
class Layout:
    """A grid of ranks; equal grids of equal shape are equal values, if strides give their ranks.

    Example:
        >>> Layout.dense((2, 4)).select((1,), {0: 1}).members()
        (4, 5, 6, 7)
        >>> Layout.of((2, 2), (7, 4, 0, 2)).select((1,), {0: 1}).members()
        (0, 2)
    """

    axes: tuple[Axis, ...]  # per axis its modes (size, stride), outermost first; () is an axis of size 1
    offset: int = 0  # the integer at coordinate (0, ..., 0)
    listed: tuple[int, ...] | None = None  # the rank at each integer, where no strides give them; None: it is the rank

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(map(coalesce, self.axes)))

    @classmethod
    def dense(cls, shape: Sequence[int], offset: int = 0) -> Layout:
        """The row-major grid that counts up from `offset`."""
        return cls(tuple(((size, prod(shape[i + 1 :])),) for i, size in enumerate(shape)), offset)  # (2, 4): by 4 and 1

    @classmethod
    def fit(cls, shape: Sequence[int], members: Sequence[int]) -> Layout | None:
        """The layout that lists exactly `members` in row-major order, or None when they follow no strides."""
        axes = []
        for i, size in enumerate(shape):  # (2, 4): axis 0 has members 0 and 4, axis 1 members 0 to 3
            step = prod(shape[i + 1 :])
            axis = fit_axis([members[k * step] - members[0] for k in range(size)])  # step 4: members 0, 4
            if axis is None:
                return None
            axes.append(axis)
        layout = cls(tuple(axes), members[0])
        return layout if layout.members() == tuple(members) else None

    @classmethod
    def of(cls, shape: Sequence[int], ranks: Sequence[int]) -> Layout:
        """The layout of any distinct ranks in row-major order."""
        return cls.fit(shape, ranks) or replace(cls.dense(shape), listed=tuple(ranks))

    def identity(self) -> Layout | tuple[int, ...]:
        """Equal for grids of one shape of the same ranks: a layout if they have strides after all, else the ranks."""
        return self if self.listed is None else self.fit(self.shape, self.members()) or self.members()

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Number of positions on each axis."""
        return tuple(prod(size for size, _ in axis) for axis in self.axes)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.axes)

    def __call__(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate."""
        position = self.position(coordinate)
        return position if self.listed is None else self.listed[position]

    def position(self, coordinate: Sequence[int]) -> int:
        """The integer at a coordinate."""
        return self.offset + sum(axis_offset(axis, i) for axis, i in zip(self.axes, coordinate, strict=True))

    def members(self) -> tuple[int, ...]:
        """Every rank of the grid in row-major order."""
        return tuple(self.line())

    def line(self) -> Sequence[int]:
        """Every rank in row-major order, as a range where one stride gives them: as cheap for 16,384 as for four."""
        match coalesce(self._modes()):
            case ((size, stride),) if stride and self.listed is None:
                return range(self.offset, self.offset + size * stride, stride)  # (4, 2) from 1: 1 3 5 7
        positions = (self.offset + m for m in axis_members(self._modes()))
        return tuple(positions if self.listed is None else (self.listed[p] for p in positions))

    def _modes(self) -> Axis:
        return tuple(mode for axis in self.axes for mode in axis)

    def coordinate(self, member: int) -> tuple[int, ...] | None:
        """The first coordinate, in row-major order, with the rank `member`; None when there is none."""
        if self.listed is not None:
            if member not in self.listed:
                return None
            member = self.listed.index(member)
        if not self._nests():
            return next((c for c in product(*map(range, self.shape)) if self.position(c) == member), None)
        rest = member - self.offset
        if rest < 0:
            return None
        # Digits from the largest stride: 14 in ((2, 12), (4, 1)) is 1 * 12 + 2 * 1, so index 1 * 4 + 2.
        modes = [(stride, size, a, m) for a, axis in enumerate(self.axes) for m, (size, stride) in enumerate(axis)]
        indices = [0] * self.ndim
        for stride, size, a, m in sorted(modes, reverse=True):
            digit = min(rest // stride, size - 1)  # 14 // 12 = 1, rest 2; then 2 // 1 = 2, rest 0
            rest -= digit * stride
            indices[a] += digit * prod(inner for inner, _ in self.axes[a][m + 1 :])  # 1 * 4, then 2: index 6
        return tuple(indices) if rest == 0 else None

    def is_injective(self) -> bool:
        """Whether no rank is at two coordinates."""
        return self._nests() or len(set(self.members())) == prod(self.shape)

    def select(self, axes: Sequence[int], at: Mapping[int, int] = MappingProxyType({})) -> Layout:
        """The grid over some axes in the order asked for, the others fixed at `at` (0 when absent)."""
        offset = self.offset + sum(axis_offset(self.axes[axis], i) for axis, i in at.items())  # (2, 4), axis 0 at 1: 4
        return Layout(tuple(self.axes[a] for a in axes), offset, self.listed)

    def flatten(self) -> Layout:
        """The grid with all axes merged into one, row-major."""
        return Layout((self._modes(),), self.offset, self.listed)

    def unflatten(self, axis: int, sizes: Sequence[int]) -> Layout:
        """The grid with one axis split row-major into several; it lists its ranks where no strides describe it.

        MeshError if the sizes do not multiply to the size of the axis.
        """
        if prod(sizes) != self.shape[axis] or any(size < 1 for size in sizes):
            raise MeshError(f"axis {axis} of shape {self.shape} has {self.shape[axis]} ranks: not {tuple(sizes)}")
        inner = Layout.fit(sizes, axis_members(self.axes[axis]))  # 8 ranks, (2, 4): strides 4 and 1
        if inner is None:
            return self.of((*self.shape[:axis], *sizes, *self.shape[axis + 1 :]), self.members())
        return Layout((*self.axes[:axis], *inner.axes, *self.axes[axis + 1 :]), self.offset, self.listed)

    def _nests(self) -> bool:
        """Whether each stride, from small to large, steps over all that the smaller ones reach."""
        reach = 0  # 4:1 reaches 3, over which 2:4 steps, and 2:3 does not
        for stride, size in sorted((s, n) for n, s in self._modes()):
            if stride <= reach:
                return False
            reach += stride * (size - 1)  # 4:1 reaches 3, and 2:4 then 7
        return True

    def __repr__(self) -> str:
        axes = " x ".join("*".join(f"{n}:{s}" for n, s in axis) or "1" for axis in self.axes)
        return f"Layout({axes or 'point'} @ {self.offset}{' of listed ranks' if self.listed else ''})"


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
