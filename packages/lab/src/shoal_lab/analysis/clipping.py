"""Gradients that were clipped by a wrong norm.

The norm may be the norm of the local shards only, or may count replicas several times. A wrong norm
scales all gradients of a rank by one factor, so the factors of the ranks are compared with the
norms over each set of axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isclose

import torch

from ..records import StepRecord, Values
from .copies import RankCopy, Setting, best_factor
from .explanations import FittingExplanation


def explain_clip(
    copies: Mapping[str, Sequence[RankCopy]], wholes: Values, step: StepRecord, setting: Setting
) -> tuple[FittingExplanation, ...]:
    """Explain one factor per rank, common to all its gradients, by the norm that it divided by.

    Args:
        copies: the copies of the gradients, by logical name.
        wholes: the gradients of one device, after clipping.
        step: the record of one device, with the gradients before clipping.
        setting: grid and tolerances.
    """
    factors = _common_factors(copies, wholes, setting)
    if factors is None or len(copies) < 2:
        return ()
    clip = _clip_of_one_device(wholes, step)
    grid = setting.grid
    sharded = _sharded_axes(copies, setting)
    found = list[FittingExplanation]()
    for axes in ((), *grid.subsets()):
        norms = _norms_over(copies, wholes, axes, setting)
        true_norm = _norm(value.tensor.norm() for value in wholes.values())
        if axes == sharded and not found and _is_exact(norms, true_norm):
            continue
        if _explains(factors, norms, (true_norm, clip)):
            found.append(_describe(axes, sharded, setting))
            break
    return tuple(found)


def _is_exact(norms: Mapping[int, float], norm: float) -> bool:
    """Return whether every rank has the norm of one device."""
    return all(isclose(value, norm, rel_tol=1e-9) for value in norms.values())


def _common_factors(
    copies: Mapping[str, Sequence[RankCopy]], wholes: Values, setting: Setting
) -> dict[int, float] | None:
    """Return the factor of each rank; None if parameters of a rank have different factors."""
    factors = dict[int, float]()
    for name, group in copies.items():
        for copy in group:
            whole = wholes[name].tensor
            if float(copy.part_of(whole).norm()) <= setting.floor:
                continue
            factor = best_factor([copy], whole, setting)
            if factor is None or factor <= 0:
                return None
            known = factors.setdefault(copy.rank, factor)
            if not isclose(known, factor, rel_tol=max(1e-6, 10 * setting.tolerance)):
                return None
    return factors or None


def _clip_of_one_device(wholes: Values, step: StepRecord) -> float:
    """Return the factor by which one device clipped its gradients; 1 if it did not."""
    before = list[torch.Tensor]()
    for name in wholes:
        parts = [growth[name].tensor for growth in step.unreduced if name in growth]
        if parts:
            before.append(torch.stack(parts).sum(0).norm())
    norm = _norm(before)
    clipped = _norm(value.tensor.norm() for value in wholes.values())
    return clipped / norm if norm else 1.0


def _norm(norms: Iterable[torch.Tensor]) -> float:
    """Return the norm of all tensors together."""
    return float(sum(float(norm) ** 2 for norm in norms) ** 0.5)


def _norms_over(
    copies: Mapping[str, Sequence[RankCopy]],
    wholes: Values,
    axes: tuple[str, ...],
    setting: Setting,
) -> dict[int, float]:
    """Return for each rank the norm of the parts of its group along some axes."""
    squares = dict[int, float]()
    for name, group in copies.items():
        for copy in group:
            part = float(copy.part_of(wholes[name].tensor).square().sum())
            squares[copy.rank] = squares.get(copy.rank, 0.0) + part
    norms = dict[int, float]()
    groups = setting.grid.groups(axes) if axes else [(rank,) for rank in squares]
    for ranks in groups:
        total = sum(squares.get(rank, 0.0) for rank in ranks)
        norms |= dict.fromkeys(ranks, total**0.5)
    return norms


def _explains(
    factors: Mapping[int, float], norms: Mapping[int, float], whole: tuple[float, float]
) -> bool:
    """Return whether clipping by these norms gives these factors.

    One device clips to `limit`: it multiplies its gradients by `clip = limit / norm`. A rank
    multiplies by `limit / own_norm`, so its gradients are `norm / own_norm` times right. If its own
    norm is below the limit, the rank does not clip, and its gradients are `1 / clip` times right.

    Args:
        factors: the factor of each rank.
        norms: the norm of each rank.
        whole: `norm` and `clip` of one device.
    """
    norm, clip = whole
    # whether any factor differs from 1
    differs = False
    for rank, factor in factors.items():
        if not norms.get(rank):
            return False
        expected = norm / norms[rank]
        if clip < 1 - 1e-9:
            expected = min(expected, 1 / clip)
        if not isclose(factor, expected, rel_tol=1e-6):
            return False
        differs = differs or not isclose(factor, 1, rel_tol=1e-6)
    return differs


def _sharded_axes(copies: Mapping[str, Sequence[RankCopy]], setting: Setting) -> tuple[str, ...]:
    """Return the axes along which a parameter is sharded, or exists on some ranks only."""
    sharded = set[str]()
    for group in copies.values():
        by_rank = {copy.rank: copy for copy in group}
        for axis in setting.grid.names:
            for ranks in setting.grid.groups((axis,)):
                first = by_rank.get(ranks[0])
                for rank in ranks[1:]:
                    other = by_rank.get(rank)
                    if first is None or other is None:
                        is_alike = first is other
                    else:
                        is_alike = torch.equal(first.index, other.index)
                    if not is_alike:
                        sharded.add(axis)
    return tuple(axis for axis in setting.grid.names if axis in sharded)


def _describe(
    axes: tuple[str, ...], sharded: tuple[str, ...], setting: Setting
) -> FittingExplanation:
    """Describe a norm over some axes that should have been the norm over the sharded axes."""
    missing = tuple(axis for axis in sharded if axis not in axes)
    extra = tuple(axis for axis in axes if axis not in sharded)
    if missing:
        over = ", ".join(missing)
        text = f"local clip norm: missing all-reduce of the squared norm over {over}"
        return FittingExplanation("local clip norm", missing, text)
    over = ", ".join(extra or axes)
    text = f"clip norm too large: replicated gradients are counted once for each rank of {over}"
    return FittingExplanation("local clip norm", extra or axes, text)
