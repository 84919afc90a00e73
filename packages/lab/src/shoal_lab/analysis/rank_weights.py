"""Explanations with a number for each rank: weights of a sum over an axis, or factors of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

import torch
from torch import Tensor

from shoal_mesh.internal import missing_all_reduce

from .copies import Expected, RankCopy, Setting, are_multiples, best_factor
from .explanations import FittingExplanation


def weigh_ranks(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Find weights of the ranks along an axis with which their sum is right."""
    if quantity != "gradient" or are_multiples(copies, expected.now, setting):
        return []
    found = list[FittingExplanation]()
    by_rank = {copy.rank: copy for copy in copies}
    for axis in setting.grid.names:
        weights = _weights_over(by_rank, axis, expected.now, setting)
        if weights is None:
            continue
        listed = ", ".join([f"{weight:.4g}" for weight in weights])
        text = f"{missing_all_reduce([axis])} with the weights {listed}"
        found.append(FittingExplanation("missing reduction", (axis,), text))
    return found


def _weights_over(
    by_rank: dict[int, RankCopy], axis: str, whole: Tensor, setting: Setting
) -> list[float] | None:
    """Return weights of the positions on an axis with which sums along it are right, or None."""
    grid = setting.grid
    columns = list[Tensor]()
    targets = list[Tensor]()
    for ranks in grid.groups((axis,)):
        group = [by_rank[rank] for rank in ranks if rank in by_rank]
        if len(group) != grid.size_of((axis,)):
            return None
        if any(not torch.equal(copy.index, group[0].index) for copy in group):
            return None
        columns.append(torch.stack([copy.values.flatten() for copy in group], 1))
        targets.append(group[0].part_of(whole).flatten())
    matrix = torch.cat(columns)
    target = torch.cat(targets)
    equations, unknowns = matrix.shape
    if equations <= 2 * unknowns or unknowns < 2:
        return None
    solution = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    if not setting.is_close(matrix @ solution, target):
        return None
    weights: list[float] = solution.tolist()
    return weights


def scale_ranks(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Find a factor for each rank separately."""
    factors = dict[int, float]()
    for copy in copies:
        factor = best_factor([copy], expected.now, setting)
        if copy.values.numel() and (factor is None or copy.values.numel() < 3):
            return []
        factors[copy.rank] = 1.0 if factor is None else factor
    axes = _axes_of_factors(factors, setting)
    numbers = ", ".join(f"{factor:.4g}" for factor in factors.values())
    return [
        FittingExplanation("scaled", axes, f"scaled by a different factor on each rank: {numbers}")
    ]


def _axes_of_factors(factors: dict[int, float], setting: Setting) -> tuple[str, ...]:
    """Return the axes along which the factors of ranks differ."""
    differing = list[str]()
    for axis in setting.grid.names:
        for ranks in setting.grid.groups((axis,)):
            numbers = [factors[rank] for rank in ranks if rank in factors]
            if any(not isclose(number, numbers[0], rel_tol=1e-6) for number in numbers):
                differing.append(axis)
                break
    return tuple(differing)
