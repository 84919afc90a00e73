"""Relations between the losses of the ranks and the loss of one device.

Along an axis the losses are equal, or their mean or sum is the loss of one device. If ranks have
different numbers of targets, only a weighted mean is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

from ..records import StepRecord
from .explanations import FittingExplanation
from .grid import MeshGrid


def relate_losses(
    steps: Sequence[StepRecord], reference: StepRecord, grid: MeshGrid
) -> dict[str, str]:
    """Return for each axis how the losses of its ranks give the loss of one device.

    Returns:
        "equal", "mean" or "sum" by axis; {} if no relation holds.
    """
    losses = _first_losses(steps)
    if losses is None or not reference.losses:
        return {}
    whole = reference.losses[0]
    distinct = _distinct_axes(losses, grid)
    relations = dict.fromkeys(grid.names, "equal")
    ranks = grid.groups(distinct)[0] if distinct else (0,)
    total = sum(losses[rank] for rank in ranks)
    if isclose(total / len(ranks), whole, rel_tol=1e-6):
        return relations | dict.fromkeys(distinct, "mean")
    if isclose(total, whole, rel_tol=1e-6):
        return relations | dict.fromkeys(distinct, "sum")
    return {}


def _first_losses(steps: Sequence[StepRecord]) -> list[float] | None:
    """Return the first loss of every rank; None if a rank has none."""
    losses = list[float]()
    for step in steps:
        if not step.losses:
            return None
        losses.append(step.losses[0])
    return losses


def _distinct_axes(losses: Sequence[float], grid: MeshGrid) -> tuple[str, ...]:
    """Return the axes along which losses differ."""
    distinct = list[str]()
    for axis in grid.names:
        for ranks in grid.groups((axis,)):
            values = [losses[rank] for rank in ranks]
            if any(not isclose(value, values[0], rel_tol=1e-9) for value in values):
                distinct.append(axis)
                break
    return tuple(distinct)


def explain_losses(
    steps: Sequence[StepRecord], reference: StepRecord, grid: MeshGrid
) -> tuple[FittingExplanation, ...]:
    """Explain wrong gradients by means over different numbers of targets.

    Returns:
        One explanation if the losses of the ranks, weighted by their numbers of targets, give the
        loss of one device, while the plain mean does not; else ().
    """
    losses = _first_losses(steps)
    have_counts = all(step.counts for step in steps)
    if losses is None or not reference.losses or not have_counts:
        return ()
    counts = [step.counts[0] for step in steps]
    axes = _distinct_axes(losses, grid) or _distinct_axes([float(count) for count in counts], grid)
    if not axes:
        return ()
    ranks = grid.groups(axes)[0]
    total = sum(counts[rank] for rank in ranks)
    weighted = sum(losses[rank] * counts[rank] for rank in ranks)
    numbers = [counts[rank] for rank in ranks]
    if not total or len(set(numbers)) == 1:
        return ()
    if not isclose(weighted / total, reference.losses[0], rel_tol=1e-6):
        return ()
    over = ", ".join(axes)
    text = (
        f"wrong divisor: the mean of each rank counts equally over {over}, but the ranks have "
        f"{', '.join(map(str, numbers))} targets; the loss of one device weights the ranks' means "
        "by these numbers"
    )
    return (FittingExplanation("uneven mean", axes, text),)
