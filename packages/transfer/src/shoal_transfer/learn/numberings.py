"""Random numberings: labels that stand for the elements of tensors while a loader runs.

A label is a number of 49 bits, which int64 and float64 hold exactly. Constants of a loader (0, 1,
a scale) are not labels. The labels are pseudo-random, so arithmetic on labels does not give labels.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# A position is mixed into a pseudo-random number of 48 bits. A label is this number plus 2**48, so
# it has 49 bits and is larger than every constant of a loader. A float64 has 53 bits for digits, so
# a label fits with the fraction 1/4, which takes two bits.
_MIXED_BITS = 48
_HALF = _MIXED_BITS // 2
_BASE = 2**_MIXED_BITS
_LARGEST_MIXED = _BASE - 1
_FRACTION = 0.25


class Labels(Protocol):
    """Labels of positions, and back."""

    def label(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the labels of positions in a dtype."""

    def position(self, labels: Tensor) -> Tensor:
        """Return the positions of labels; -1 where a value is not a label."""


class Numbering(NamedTuple):
    """A random bijection between positions and labels.

    Attributes:
        key: is mixed into the position.
        factors: two odd numbers. A product with an odd number modulo 2**48 can be inverted.
        sign: 1 or -1, the sign of all labels. A loader may compute different results for positive
            and negative values (`abs`, `relu`). Its runs with two numberings of opposite signs then
            disagree, so that the dependence on the sign is found.
        size: number of positions; below 2**40.
        scale: factor of the labels in float64; a power of 2.

    Example:
        >>> numbering = draw_numbering(seed=0, sign=-1, size=3)
        >>> labels = numbering.label(torch.arange(3), torch.float64)
        >>> numbering.position(labels).tolist(), numbering.position(labels + 1).tolist()
        ([0, 1, 2], [-1, -1, -1])
    """

    key: int
    factors: tuple[int, int]
    sign: int
    size: int
    scale: float = 1.0

    def label(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the labels of positions.

        Args:
            positions: int64, any shape.
            dtype: int64 or float64. The fraction of a label in float64 is 1/4, so that a loader
                that rounds gets values that are not labels.
        """
        mixed = positions ^ self.key
        for factor in self.factors:
            mixed = (mixed * factor) & _LARGEST_MIXED
            mixed = _mix_halves(mixed)
        labels = mixed + _BASE
        if dtype.is_floating_point:
            labels = (labels.to(dtype) + _FRACTION) * self.scale
        signed: Tensor = self.sign * labels
        return signed

    def position(self, labels: Tensor) -> Tensor:
        """Return the positions, int64; -1 where a value is not a label of a position."""
        values = self.sign * labels
        if values.dtype.is_floating_point:
            values = values / self.scale
        whole = values.to(torch.int64)
        mixed = whole - _BASE
        possible = (mixed >= 0) & (mixed <= _LARGEST_MIXED)
        if values.dtype.is_floating_point:
            possible &= values - _FRACTION == whole.to(values.dtype)
        mixed = mixed.clamp(0, _LARGEST_MIXED)
        for factor in reversed(self.factors):
            mixed = _mix_halves(mixed)
            mixed = (mixed * pow(factor, -1, _BASE)) & _LARGEST_MIXED
        positions = mixed ^ self.key
        return torch.where(possible & (positions < self.size), positions, -1)


def _mix_halves(numbers: Tensor) -> Tensor:
    """Replace the lower 24 bits of each number by their exclusive or with the upper 24 bits.

    The function is its own inverse, because it does not change the upper bits.
    """
    upper_bits = numbers >> _HALF
    return numbers ^ upper_bits


def draw_numbering(seed: int, sign: int, size: int) -> Numbering:
    """Draw a numbering of `size` positions."""
    random = Random(seed)
    first = random.randrange(_BASE // 2, _BASE) | 1
    second = random.randrange(_BASE // 2, _BASE) | 1
    return Numbering(random.randrange(_BASE), (first, second), sign, size)


class LabelTable:
    """Labels that are given for each position, all different.

    Args:
        labels: (n,), of the positions from 0.

    Raises:
        ValueError: two labels are equal.

    Example:
        >>> table = LabelTable(torch.tensor([7.0, 5.0]))
        >>> table.position(torch.tensor([5.0, 6.0])).tolist()
        [1, -1]
    """

    def __init__(self, labels: Tensor) -> None:
        self._labels = labels
        self._sorted, self._order = labels.sort()
        if bool((self._sorted[1:] == self._sorted[:-1]).any()):
            raise ValueError("two labels are equal")

    def label(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the labels of positions."""
        return self._labels[positions].to(dtype)

    def position(self, labels: Tensor) -> Tensor:
        """Return the positions of labels; -1 where a value is not a label."""
        if not self._sorted.numel():
            return torch.full(labels.shape, -1)
        places = torch.searchsorted(self._sorted, labels.contiguous())
        places = places.clamp(max=self._sorted.numel() - 1)
        return torch.where(self._sorted[places] == labels, self._order[places], -1)
