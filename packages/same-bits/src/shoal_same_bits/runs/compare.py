"""compare_runs: the first value in which two runs differ, and how many do."""

from __future__ import annotations

import torch

from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import takes
from shoal_mesh.internal import dataclass

from .record import RunRecord, Value


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare_runs` has found.

    Attributes:
        differing: the values that differ, in the order of the first run, each with how much: the norm of the difference
            relative to that of the value, infinite where shapes differ or one has elements that are broken.
        before: the last value before the first of them that both runs have and that agrees; '' if there is none.
        compared: how many values both runs have.
        alone: how many values only one run has.
    """

    differing: list[tuple[str, float]]
    before: str
    compared: int
    alone: int

    @property
    def first(self) -> str:
        """The name of the first value that differs; '' if none does."""
        return self.differing[0][0] if self.differing else ""

    def __str__(self) -> str:
        """Lines to read."""
        counted = f"{self.compared} values compared, {self.alone} in one run only"
        if not self.differing:
            return f"no value differs: {counted}"
        lines = [f"{len(self.differing)} values differ: {counted}"]
        lines.append(f"the last value that agrees: {self.before or 'none'}")
        lines += [f"  {name}: by {difference:.1e}" for name, difference in self.differing[:10]]
        return "\n".join([*lines, "  ..."] if len(self.differing) > 10 else lines)


@takes(one=RunRecord, other=RunRecord, tolerance=(int, float, type(None)))
def compare_runs(one: RunRecord, other: RunRecord, tolerance: float | None = None) -> Comparison:
    """Where two runs differ first: of two programs, on as many ranks or others, or sharded and on a single device.

    Values are found by their names. A name that only one run has is counted, not compared: a module with a style runs
    other operators than the plain one. What ranks computed on plain tensors is compared between runs on as many ranks.

    Args:
        one, other: from `record_run`, or `RunRecord.load`.
        tolerance: how much values may differ, relative to their norms; by default the square root of the precision of
            the coarser dtype. 0 asks for equal bits.

    Raises:
        StyleError: the runs have no value in common, or the tolerance is negative.

    Example:
        >>> from shoal_same_bits import record_run
        >>> model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
        >>> with record_run(model) as one:
        ...     y = model(x)
        >>> with torch.no_grad():
        ...     model.bias[2] += 0.1
        >>> with record_run(model) as other:
        ...     y = model(x)
        >>> compare_runs(one, other).first
        'bias before'
    """
    if tolerance is not None and not tolerance >= 0:
        raise StyleError(f"a tolerance is at least 0, got {tolerance}")
    others = {value.name: value for value in other.values}
    differing, before, compared = list[tuple[str, float]](), "", 0
    for value in one.values:
        match = others.get(value.name)
        if match is None or match.by_rank != value.by_rank or (value.by_rank and one.ranks != other.ranks):
            continue
        compared += 1
        difference, allowed = _difference(value, match), _allowed(value, match) if tolerance is None else tolerance
        if (value.digest != match.digest or difference) and not 0 < allowed >= difference:
            differing.append((value.name, difference))
        elif not differing:
            before = value.name
    if not compared:
        raise StyleError("the runs have no value in common: record the same model, by the same names")
    return Comparison(differing, before, compared, len(one.values) + len(other.values) - 2 * compared)


def _difference(one: Value, other: Value) -> float:
    """The norm of the difference relative to the larger norm, about."""
    if one.shape != other.shape or one.broken != other.broken:
        return float("inf")
    norm = max(one.norm, other.norm)
    squares = sum((a - b) ** 2 for a, b in zip(one.sums, other.sums, strict=True))
    return float(squares**0.5 / norm) if norm else 0.0


def _allowed(one: Value, other: Value) -> float:
    """The square root of the precision of the coarser dtype; that of whole numbers is 0."""
    dtypes = [getattr(torch, value.dtype) for value in (one, other)]
    return max(torch.finfo(d).eps ** 0.5 if d.is_floating_point or d.is_complex else 0.0 for d in dtypes)
