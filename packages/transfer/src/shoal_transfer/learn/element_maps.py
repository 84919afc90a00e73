"""Assignments from a map of elements: each element of a target and its place in a source.

A replay finds the position of each element's source. Here a target is divided into regions with one
source, and these into regions along whose dims the positions advance by constant steps. Each of
them is one assignment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..mapping.assignment import Assignment
from ..mapping.regions import Region, take, whole_region


class LabelledTensor(NamedTuple):
    """A tensor whose elements have labels.

    Attributes:
        name: name of the source; None for the target itself, whose elements keep their values.
        shape: shape of the tensor.
        first_position: position of its first element; the others follow in C order.
    """

    name: str | None
    shape: tuple[int, ...]
    first_position: int


class ElementMap(NamedTuple):
    """The origin of each element of a target.

    Attributes:
        positions: the position of each element among all labelled elements; -1 for a constant.
        constants: values of the constants.
    """

    positions: Tensor
    constants: Tensor


def assign_elements(
    target: str, elements: ElementMap, tensors: Sequence[LabelledTensor]
) -> list[Assignment]:
    """Return few assignments that give each element of a target its origin.

    Args:
        target: name of the target tensor.
        elements: positions and constants, of the target's shape.
        tensors: the labelled tensors in the order of their positions.

    Example:
        >>> tensors = [LabelledTensor("a", (2, 3), 0), LabelledTensor("b", (2,), 6)]
        >>> positions = torch.tensor([0, 3, 7, -1, -1])
        >>> elements = ElementMap(positions, torch.zeros(5))
        >>> for assignment in assign_elements("c", elements, tensors):
        ...     print(assignment)
        'c'[0:2] = 'a'[0:2, 0:1] along (0,)
        'c'[2:3] = 'b'[1:2] along (None,)
        'c'[3:5] = 0.0
    """
    positions = elements.positions.contiguous()
    if not positions.numel():
        return []
    firsts = torch.tensor([tensor.first_position for tensor in tensors] or [0])
    numbers = torch.searchsorted(firsts, positions, right=True) - 1
    # constants are compared by their bits, because NaN is not equal to NaN
    bits = elements.constants.double().contiguous().view(torch.int64)
    values, codes = torch.unique(bits, return_inverse=True)
    # kind of each element: the index of its tensor, or for a constant a number after all of these
    kinds = torch.where(positions < 0, len(tensors) + codes, numbers)
    found: list[Assignment] = []
    for region in _uniform_regions([kinds], whole_region(positions.shape)):
        kind = int(_first(kinds, region))
        if kind >= len(tensors):
            value = values[kind - len(tensors)].view(torch.float64).item()
            found.append(Assignment(target, region, fill=value))
        elif tensors[kind].name is None:
            found.append(Assignment(target, region))
        else:
            found += _assign_source(target, region, positions, tensors[kind])
    return found


def _assign_source(
    target: str, region: Region, positions: Tensor, source: LabelledTensor
) -> Iterator[Assignment]:
    """Yield the assignments of a region whose elements are all of one source."""
    rest = positions - source.first_position
    indices = []
    for dim, size in enumerate(source.shape):
        stride = prod(source.shape[dim + 1 :])
        indices.append(rest // stride % size)
    for part in _straight_regions(indices, region):
        yield _assign_straight(target, part, source, indices)


def _assign_straight(
    target: str, region: Region, source: LabelledTensor, indices: Sequence[Tensor]
) -> Assignment:
    """Return the assignment of a region in which each dim advances at most one source dim."""
    source_region = []
    for index in indices:
        first = int(_first(index, region))
        source_region.append(range(first, first + 1))
    dims: list[int | None] = []
    for dim, steps in enumerate(_steps(indices, region)):
        moved = [number for number, step in enumerate(steps) if step]
        dims.append(moved[0] if moved else None)
        for number in moved:
            start = source_region[number].start
            count = len(region[dim])
            stop = start + (count - 1) * steps[number] + 1
            source_region[number] = range(start, stop, steps[number])
    name = source.name
    return Assignment(
        target, region, source=name, source_region=tuple(source_region), dims=tuple(dims)
    )


# --- regions --------------------------------------------------------------------------------------


def _uniform_regions(keys: Sequence[Tensor], region: Region) -> Iterator[Region]:
    """Yield parts of a region such that every key has one value in each part."""
    parts = _best_parts(_Keys(keys, only_equal=True), region)
    if parts is None:
        yield region
        return
    for part in parts:
        yield from _uniform_regions(keys, part)


def _straight_regions(keys: Sequence[Tensor], region: Region) -> Iterator[Region]:
    """Yield parts of a region in which each dim advances at most one key, by a constant step."""
    parts = _best_parts(_Keys(keys, only_equal=False), region)
    if parts is None:
        crooked = _crooked_dim(keys, region)
        if crooked is None:
            yield region
            return
        single = (range(index, index + 1) for index in region[crooked])
        parts = [_with(region, crooked, indices) for indices in single]
    for part in parts:
        yield from _straight_regions(keys, part)


def _crooked_dim(keys: Sequence[Tensor], region: Region) -> int | None:
    """Return a dim along which the keys advance in a way that one assignment cannot express.

    The dim advances several keys, or a key that another dim advances too, or a key backwards.
    """
    walked = set[int]()
    for dim, steps in enumerate(_steps(keys, region)):
        moved = {key for key, step in enumerate(steps) if step}
        if len(moved) > 1 or moved & walked or min(steps, default=0) < 0:
            return dim
        walked |= moved
    return None


def _best_parts(keys: _Keys, region: Region) -> list[Region] | None:
    """Divide a region along the dim that needs fewest parts; None if no dim needs a division."""
    best: list[Region] | None = None
    for dim, indices in enumerate(region):
        if len(indices) < 2:
            continue
        chosen = keys.sections(region, dim)
        if len(chosen) == 1:
            continue
        for period in _periods(chosen):
            turns = [range(turn, len(indices), period) for turn in range(period)]
            if len(turns) < len(chosen) and keys.is_periodic(region, dim, turns):
                chosen = turns
        if best is None or len(chosen) < len(best):
            best = [_with(region, dim, take(indices, section)) for section in chosen]
    return best


def _periods(sections: Sequence[range]) -> list[int]:
    """Return lengths after which a pattern of up to six sections may repeat."""
    return [section.stop for section in sections[:6]]


class _Keys:
    """Integers of each element of a target, and the sections of a dim that they determine.

    Args:
        keys: tensors of the target's shape.
        only_equal: whether the keys in a section must be equal; otherwise their differences from
            index to index must be.
    """

    def __init__(self, keys: Sequence[Tensor], *, only_equal: bool) -> None:
        self._keys = keys
        self._only_equal = only_equal

    def sections(self, region: Region, dim: int) -> list[range]:
        """Return the sections of a dim of a region, as ranges of positions.

        Example: a key whose steps are 1 1 5 1 has the sections 0:3 and 3:5.
        """
        steps = [*zip(*(_steps_along(key, region, dim) for key in self._keys), strict=True)]
        sections = []
        start = 0
        count = len(region[dim])
        while start < count:
            stop = start + 1
            if stop < count and self._may_join(steps[start]):
                while stop < count and steps[stop - 1] == steps[start]:
                    stop += 1
            sections.append(range(start, stop))
            start = stop
        return sections

    def is_periodic(self, region: Region, dim: int, turns: Sequence[range]) -> bool:
        """Return whether each of the interleaved parts of a dim is one section."""
        for turn in turns:
            part = _with(region, dim, take(region[dim], turn))
            if len(turn) < 2 or len(self.sections(part, dim)) > 1:
                return False
        return True

    def _may_join(self, steps: Sequence[int | None]) -> bool:
        if None in steps:
            return False
        return not self._only_equal or not any(steps)


def _steps_along(key: Tensor, region: Region, dim: int) -> list[int | None]:
    """Return a key's step from each index of a dim to the next; None if elements differ in it."""
    differences = _view(key, region).diff(dim=dim).movedim(dim, 0)
    differences = differences.reshape(len(differences), -1)
    lowest = differences.amin(1)
    is_constant = lowest == differences.amax(1)
    pairs = zip(lowest.tolist(), is_constant.tolist(), strict=True)
    return [step if constant else None for step, constant in pairs]


def _steps(keys: Sequence[Tensor], region: Region) -> list[list[int]]:
    """Return for each dim of a region the constant step of each key."""
    found = []
    for dim, indices in enumerate(region):
        if len(indices) < 2:
            found.append([0] * len(keys))
            continue
        neighbor = [
            range(indices_of_dim.start, indices_of_dim.start + 1) for indices_of_dim in region
        ]
        neighbor[dim] = range(indices[1], indices[1] + 1)
        pairs = [(_first(key, region), _first(key, tuple(neighbor))) for key in keys]
        found.append([int(second) - int(first) for first, second in pairs])
    return found


def _view(tensor: Tensor, region: Region) -> Tensor:
    return tensor[tuple(slice(part.start, part.stop, part.step) for part in region)]


def _first(tensor: Tensor, region: Region) -> Tensor:
    return tensor[tuple(part.start for part in region)]


def _with(region: Region, dim: int, indices: range) -> Region:
    return (*region[:dim], indices, *region[dim + 1 :])
