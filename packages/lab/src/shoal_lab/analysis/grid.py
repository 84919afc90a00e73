"""`MeshGrid`: ranks at coordinates of named axes, without process groups and without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from math import prod


@dataclass(frozen=True, slots=True)
class MeshGrid:
    """Ranks in a grid of named axes, the last axis fastest.

    Attributes:
        names: the names of the axes.
        sizes: the sizes of the axes.

    Example:
        >>> grid = MeshGrid.of({"dp": 2, "tp": 3})
        >>> grid.coordinate(4)
        (1, 1)
        >>> grid.groups(("dp",))
        [(0, 3), (1, 4), (2, 5)]
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, axes: Mapping[str, int]) -> MeshGrid:
        """Make the grid of axes and sizes."""
        return cls(tuple(axes), tuple(axes.values()))

    @property
    def count(self) -> int:
        """The number of ranks."""
        return prod(self.sizes)

    def size_of(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks along some axes together."""
        sizes = dict(zip(self.names, self.sizes, strict=True))
        return prod(sizes[name] for name in axes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of a rank on every axis."""
        coordinate = list[int]()
        for size in reversed(self.sizes):
            rank, position = divmod(rank, size)
            coordinate.append(position)
        return tuple(reversed(coordinate))

    def position(self, rank: int, axis: str) -> int:
        """Return the coordinate of a rank on one axis."""
        return self.coordinate(rank)[self.names.index(axis)]

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return the ranks that differ on some axes only, one tuple for each group."""
        by_others = dict[tuple[int, ...], list[int]]()
        for rank, coordinate in enumerate(product(*map(range, self.sizes))):
            others = tuple(
                position
                for name, position in zip(self.names, coordinate, strict=True)
                if name not in axes
            )
            by_others.setdefault(others, []).append(rank)
        return [tuple(ranks) for ranks in by_others.values()]

    def subsets(self) -> Iterator[tuple[str, ...]]:
        """Yield the non-empty sets of axes that have more than one rank, small sets first."""
        sizes = zip(self.names, self.sizes, strict=True)
        names = [name for name, size in sizes if size > 1]
        for length in range(1, len(names) + 1):
            yield from combinations(names, length)

    def __str__(self) -> str:
        """Return the axes and sizes, as dp=2, tp=3."""
        axes = zip(self.names, self.sizes, strict=True)
        return ", ".join(f"{name}={size}" for name, size in axes)
