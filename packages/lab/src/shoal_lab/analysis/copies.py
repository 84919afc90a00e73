"""The copies of a logical tensor on the ranks, its expected values, and comparisons of the two."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .grid import MeshGrid


@dataclass(frozen=True, slots=True, eq=False)
class RankCopy:
    """The values of one logical tensor on one rank.

    Attributes:
        rank: the rank that has the values.
        name: the name of the tensor on this rank.
        values: the values as float64, in the local shape.
        index: for each element its position in the flattened logical tensor; int64, in the local
            shape.
    """

    rank: int
    name: str
    values: Tensor
    index: Tensor

    def part_of(self, whole: Tensor) -> Tensor:
        """Return the elements of a logical tensor at the positions of this copy."""
        return whole.flatten()[self.index]


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """The reference values of one logical tensor: those of a run on one device.

    Attributes:
        now: the values at the step under analysis, as float64.
        earlier: the values at the steps before it, in order.
        microbatches: the gradients of each backward of the step.
        stale: the values of a faulty run on one device, in which each forward uses the parameters
            of the step before; None if this was not computed.
    """

    now: Tensor
    earlier: Sequence[Tensor] = ()
    microbatches: Sequence[Tensor] = ()
    stale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts that hold for all tensors of a run.

    Attributes:
        grid: the axes of the ranks.
        tolerance: the allowed difference relative to the norm of a value.
        floor: the allowed absolute difference, whatever the norm.
        backwards: the number of backwards in a step.
        loss_by_axis: for each axis, what the loss of one device is: "equal" to the loss of every
            rank along the axis, or the "mean" or the "sum" of their losses.
    """

    grid: MeshGrid
    tolerance: float
    floor: float = 0.0
    backwards: int = 1
    loss_by_axis: dict[str, str] = field(default_factory=dict)

    def is_close(self, values: Tensor, expected: Tensor) -> bool:
        """Return whether values are as expected, within the tolerance."""
        difference = float((values - expected).norm())
        return difference <= self.tolerance * float(expected.norm()) + self.floor


def is_right(copies: Iterable[RankCopy], whole: Tensor, setting: Setting) -> bool:
    """Return whether all copies are equal to their part of the whole tensor."""
    return all(setting.is_close(copy.values, copy.part_of(whole)) for copy in copies)


def relative_difference(copies: Sequence[RankCopy], whole: Tensor) -> float:
    """Return the norm of the difference of all copies relative to the norm of their parts."""
    difference = 0.0
    norm = 0.0
    for copy in copies:
        part = copy.part_of(whole)
        difference += float((copy.values - part).square().sum())
        norm += float(part.square().sum())
    if norm:
        return math.sqrt(difference / norm)
    return float("inf") if difference else 0.0


def sum_over(
    copies: Sequence[RankCopy], axes: tuple[str, ...], grid: MeshGrid
) -> list[RankCopy] | None:
    """Sum the copies over some axes: in each group of ranks with equal coordinates on other axes.

    Returns:
        The copies with the sums in place of the values. None if the ranks of a group have
        different elements, or if all ranks of every group have equal values already.
    """
    by_rank = dict[int, RankCopy]()
    for copy in copies:
        by_rank[copy.rank] = copy
    summed = list[RankCopy]()
    has_different_values = False
    for ranks in grid.groups(axes):
        group = [by_rank[rank] for rank in ranks if rank in by_rank]
        if not group:
            continue
        first = group[0]
        for copy in group[1:]:
            if not torch.equal(copy.index, first.index):
                return None
            if not torch.allclose(copy.values, first.values, 1e-9, 1e-30):
                has_different_values = True
        total = torch.stack([copy.values for copy in group]).sum(0)
        for copy in group:
            summed.append(RankCopy(copy.rank, copy.name, total, copy.index))
    return summed if has_different_values else None


def best_factor(copies: Sequence[RankCopy], whole: Tensor, setting: Setting) -> float | None:
    """Return the common factor between all copies and their parts; None if no factor fits."""
    products = 0.0
    squares = 0.0
    for copy in copies:
        part = copy.part_of(whole)
        products += float((copy.values * part).sum())
        squares += float(part.square().sum())
    # All parts are zero or empty.
    if not squares:
        return None
    factor = products / squares
    for copy in copies:
        if not setting.is_close(copy.values, factor * copy.part_of(whole)):
            return None
    return factor


def are_multiples(copies: Sequence[RankCopy], whole: Tensor, setting: Setting) -> bool:
    """Return whether every rank has a multiple of its part; ranks may have different factors."""
    # A rank that holds one element has a multiple of it whatever its value is, so a multiple proves
    # nothing for the smallest tensors.
    if whole.numel() < 3:
        return False
    return all(best_factor([copy], whole, setting) is not None for copy in copies)


def fit(
    copies: Sequence[RankCopy], basis: Sequence[Tensor], setting: Setting
) -> list[float] | None:
    """Return the coefficients of the linear combination of a basis that gives all copies, or None.

    Args:
        copies: the values of the ranks.
        basis: logical tensors of one device.
        setting: the tolerance.
    """
    columns = list[Tensor]()
    for tensor in basis:
        columns.append(torch.cat([copy.part_of(tensor).flatten() for copy in copies]))
    target = torch.cat([copy.values.flatten() for copy in copies])
    matrix = torch.stack(columns, 1)
    # n coefficients fit any n elements. More than twice as many elements fit hardly by chance.
    has_enough_elements = target.numel() > 2 * len(basis)
    is_zero = not matrix.norm()
    if not has_enough_elements or is_zero or not target.isfinite().all():
        return None
    # Each column is scaled to the norm 1, or the solver takes small columns for rounding errors.
    # The driver gelsd also allows columns that depend on each other.
    scales = matrix.norm(dim=0).clamp_min(1e-300)
    solution = torch.linalg.lstsq(matrix / scales, target[:, None], driver="gelsd").solution
    coefficients = solution[:, 0] / scales
    if not setting.is_close(matrix @ coefficients, target):
        return None
    found: list[float] = coefficients.tolist()
    return found
