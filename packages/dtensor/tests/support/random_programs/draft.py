"""A program while it is generated: its tensors so far, and random choices among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor

from .program import Machine, Program

__all__ = ["Draft", "Skip"]

T = TypeVar("T")

LARGEST = 1500  # elements
# of values: beyond, rounding errors would count
BOUND = 1e4


class Skip(Exception):
    """A random choice that does not fit; another is tried."""


class Draft:
    """The lines so far, run on plain tensors.

    Attributes:
        random: where choices come from.
        mesh: the shape of the mesh.
        lines: what has been written.
        machine: has run it.
    """

    def __init__(self, random: Random, mesh: tuple[int, ...]) -> None:
        self.random, self.mesh = random, mesh
        self.lines: list[str] = []
        self.machine = Machine()
        self._count = 0

    @property
    def program(self) -> Program:
        """The program as it is."""
        return Program(self.mesh, tuple(self.lines))

    # --- writing

    def add(self, line: str) -> None:
        """Write a line, if it runs and what it makes is tame; otherwise nothing has happened.

        Raises:
            Skip: it does not, or is not.
        """
        self.lines.append(line)
        try:
            self.machine.run([line])
            self._check()
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
            self.forget(len(self.lines) - 1)
            raise Skip(f"{line}: {error}") from None

    def forget(self, count: int) -> None:
        """Drop the lines from `count` on."""
        del self.lines[count:]
        self.machine = Machine()
        torch.manual_seed(7)
        self.machine.run(self.lines)

    def name(self) -> str:
        """A new name."""
        self._count += 1
        return f"x{self._count}"

    def _check(self) -> None:
        for name, x in self.machine.tensors().items():
            if x.numel() > LARGEST or x.ndim > 5:
                raise ValueError(f"{name} is large")
            if x.numel() and x.is_floating_point() and not bool((x.abs() < BOUND).all()):
                raise ValueError(f"{name} is not tame")

    # --- choosing

    def integer(self, low: int, high: int) -> int:
        """Between two numbers, both included."""
        return self.random.randint(low, high)

    def number(self) -> float | int:
        """A number to compute with."""
        return self.random.choice([2, -1, 0.5, 1.5, -0.25, 3])

    def chance(self, share: float) -> bool:
        """True in this share of cases."""
        return self.random.random() < share

    def pick(self, items: Sequence[T]) -> T:
        """One of several.

        Raises:
            Skip: there are none.
        """
        if not items:
            raise Skip("nothing to choose from")
        return self.random.choice(items)

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self.machine.values[name]
        return found

    def any(self, fits: Callable[[Tensor], bool] = lambda x: True) -> str:
        """A tensor's name; later ones are likelier."""
        names = [name for name, x in self.machine.tensors().items() if fits(x)]
        found: str = self.pick(names[-3:] if self.chance(0.6) else names)
        return found

    def real(self, ndim: int = 0, most: int = 5) -> str:
        """The name of a tensor of real numbers with so many dims."""
        return self.any(lambda x: x.is_floating_point() and ndim <= x.ndim <= most)

    def double(self, ndim: int = 0) -> str:
        """The same, of float64."""
        return self.any(lambda x: x.dtype == torch.float64 and ndim <= x.ndim)

    def dim(self, name: str) -> int:
        """A dim of a tensor, counted from either end."""
        n = self[name].ndim
        if not n:
            raise Skip("no dims")
        return self.integer(-n, n - 1)

    def filled(self, name: str) -> str:
        """The same name, of a tensor that has elements.

        Raises:
            Skip: it has none.
        """
        if not self[name].numel():
            raise Skip("empty")
        return name

    def distinct(self, name: str) -> str:
        """The same name, of a tensor whose order of values rounding cannot change.

        Raises:
            Skip: two of its values are close.
        """
        x = self[name].detach().double().flatten().sort().values
        if x.numel() > 1 and not bool((x.diff() > 1e-6).all()):
            raise Skip("close values")
        return name

    def away(self, name: str, *points: float) -> str:
        """The same name, of a tensor without values close to some points.

        Raises:
            Skip: it has some.
        """
        x = self[name].detach().double()
        if any(bool(((x - point).abs() < 1e-6).any()) for point in points):
            raise Skip("a value at a threshold")
        return name

    # --- new tensors

    def shape(self, ndim: int | None = None) -> tuple[int, ...]:
        """A shape; sizes of 0 and 1 are rare, and mesh sizes divide some of them."""
        n = self.random.choice([1, 2, 2, 3]) if ndim is None else ndim
        return tuple(
            self.random.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 4, 6, 8, 5, 3])
            if self.chance(0.95) or n < 3
            else 0
            for _ in range(n)
        )

    def made(self, kind: str, shape: Sequence[int]) -> str:
        """The name of a new tensor: `leaf`, `real`, `ints` or `flags`."""
        name = self.name()
        partial = kind == "real" and self.chance(0.3)
        self.add(
            f"{name} = {kind}({self.integer(0, 9)}, {tuple(shape)}, "
            f"{self.layout_of(shape, partial=partial)})"
        )
        return name

    def const(self, values: Any) -> str:
        """An expression for a tensor of listed values, replicated or sharded."""
        return f"const({values!r}, {self.layout_of(torch.tensor(values).shape, whole=0.5)})"

    def like(self, name: str) -> str:
        """The name of a tensor that broadcasts with another one."""
        shape = list(self[name].shape)
        if self.chance(0.3):
            return self.any(lambda x: x.shape == self[name].shape and x.is_floating_point())
        if self.chance(0.4):
            shape = shape[self.integer(0, len(shape)) :]
            shape = [1 if self.chance(0.3) else n for n in shape]
        return self.made("leaf" if self.chance(0.6) else "real", shape)

    def layout_of(self, shape: Sequence[int], *, partial: bool = False, whole: float = 0.25) -> str:
        """Placements as lines write them, and the shard order where it is not the usual one.

        Args:
            shape: of the tensor; partial: whether an axis may be partial; whole: share of
                replicated axes.
        """
        axes = list(range(len(self.mesh)))
        self.random.shuffle(axes)
        found = ["Replicate()"] * len(axes)
        cuts: dict[int, list[int]] = {}
        pieces: dict[int, list[int]] = {}
        for axis in axes:
            if partial and self.chance(0.5):
                found[axis] = f"Partial({self.random.choice(['sum', 'sum', 'avg', 'max'])!r})"
                partial = False
                continue
            if not shape or self.chance(whole):
                continue
            dim = self.integer(0, len(shape) - 1)
            before = pieces.get(dim, [shape[dim]])
            cuts.setdefault(dim, []).append(axis)
            found[axis], pieces[dim] = self._cut(dim, before, self.mesh[axis])
        turned = tuple(
            (dim, tuple(order)) for dim, order in sorted(cuts.items()) if order != sorted(order)
        )
        return f"[{', '.join(found)}]" + (f", order={turned}" if turned else "")

    def _cut(self, dim: int, before: list[int], ways: int) -> tuple[str, list[int]]:
        """A placement that shards a dim once more, and the sizes that it leaves."""
        kind = self.random.random()
        if kind < 0.35:
            sizes: list[int] = []
            for n in before:
                marks = sorted(self.integer(0, n) for _ in range(ways - 1))
                sizes += [b - a for a, b in zip([0, *marks], [*marks, n], strict=True)]
            return f"Shard({dim}, sizes={tuple(sizes)})", sizes
        unit = self.random.choice([2, 3]) if kind < 0.45 else 1
        sizes = []
        for n in before:
            piece = -(-n // (ways * unit)) * unit
            sizes += [max(0, min(piece, n - i * piece)) for i in range(ways)]
        return (f"Shard({dim}, multiple_of={unit})" if unit > 1 else f"Shard({dim})"), sizes
