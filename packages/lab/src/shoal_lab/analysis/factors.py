"""Names of factors: the axes or microbatches that make a value too large or too small.

A gradient that is 4 times too large on a mesh dp=4, for example, was reduced twice over dp, or a
sum over dp took the place of a mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from typing import NamedTuple

from shoal_mesh.internal import times_too, too_large, too_small

from .copies import Setting
from .explanations import FittingExplanation

# The end of the text about a factor that has no cause and is the same on all ranks.
ON_ALL_RANKS = ", on all ranks alike"


class _Cause(NamedTuple):
    """A number by which a value may be multiplied or divided, and its source.

    Attributes:
        number: the product of the sizes of the axes and of the number of backwards.
        axes: the axes.
        backwards: the number of backwards in a step, or 1 if they are not a part of the source.
    """

    number: int
    axes: tuple[str, ...]
    backwards: int


def name_factor(factor: float, setting: Setting, quantity: str) -> list[FittingExplanation]:
    """Return the explanations of a factor with the fewest axes, or its bare number if none fits.

    Args:
        factor: the value of the ranks divided by the value of one device; not 1.
        setting: the grid, the number of backwards, and how losses are averaged.
        quantity: the kind of value, such as "gradient".
    """
    sign = "with the opposite sign" if factor < 0 else ""
    size = abs(factor)
    slack = max(1e-6, 10 * setting.tolerance)
    found = list[tuple[_Cause, FittingExplanation]]()
    for cause in _causes(setting):
        if isclose(size, cause.number, rel_tol=slack):
            found.append((cause, _too_large(cause, setting, sign)))
        elif isclose(size * cause.number, 1, rel_tol=slack):
            found.append((cause, _too_small(cause, setting, sign)))
    if found:
        fewest = min(_count_sources(cause) for cause, _ in found)
        return [text for cause, text in found if _count_sources(cause) == fewest]
    if sign and isclose(size, 1, rel_tol=slack):
        return [FittingExplanation("sign", (), f"the {quantity} has the opposite sign")]
    exchanged = _exchanged_divisors(size, setting, slack)
    if exchanged:
        return exchanged
    return [FittingExplanation("scaled", (), f"scaled by {factor:.6g}{ON_ALL_RANKS}")]


def _count_sources(cause: _Cause) -> int:
    """Return the number of axes of a cause, and one more for backwards."""
    return len(cause.axes) + (cause.backwards > 1)


def _causes(setting: Setting) -> Iterator[_Cause]:
    """Yield the products of sizes of axes and of the number of backwards."""
    axes_to_try = [(), *setting.grid.subsets()]
    for backwards in {1, setting.backwards}:
        for axes in axes_to_try:
            number = setting.grid.size_of(axes) * backwards
            if number > 1:
                yield _Cause(number, axes, backwards)


def _too_large(cause: _Cause, setting: Setting, sign: str) -> FittingExplanation:
    """Describe a value that is too large."""
    if not cause.axes:
        times = times_too(cause.number, "large", sign)
        text = f"{times}: {cause.backwards} microbatches are added instead of averaged"
        return FittingExplanation("microbatches", (), text)
    text = too_large(cause.number, cause.axes, _loss_over(cause.axes, setting), sign)
    if cause.backwards > 1:
        text += f", and {cause.backwards} microbatches are added instead of averaged"
    return FittingExplanation("too large", cause.axes, text)


def _too_small(cause: _Cause, setting: Setting, sign: str) -> FittingExplanation:
    """Describe a value that is too small."""
    if not cause.axes:
        times = times_too(cause.number, "small", sign)
        text = f"{times}: divided once too often by the {cause.backwards} microbatches"
        return FittingExplanation("microbatches", (), text)
    text = too_small(cause.number, cause.axes, _loss_over(cause.axes, setting), sign)
    if cause.backwards > 1:
        text += f", and divided once too often by the {cause.backwards} microbatches"
    return FittingExplanation("too small", cause.axes, text)


def _loss_over(axes: tuple[str, ...], setting: Setting) -> str:
    """Return how the losses along axes give the loss of one device; "" if the axes differ."""
    relations = {setting.loss_by_axis.get(axis, "") for axis in axes}
    return relations.pop() if len(relations) == 1 else ""


def _exchanged_divisors(size: float, setting: Setting, slack: float) -> list[FittingExplanation]:
    """Explain a factor as the size of one set of axes divided by the size of another set."""
    found = list[FittingExplanation]()
    for right in setting.grid.subsets():
        for wrong in setting.grid.subsets():
            number = setting.grid.size_of(right) / setting.grid.size_of(wrong)
            if set(right) & set(wrong) or not isclose(size, number, rel_tol=slack):
                continue
            wrong_axes = ", ".join(wrong)
            right_axes = ", ".join(right)
            text = (
                f"{size:.6g} times as large: divided by the size of {wrong_axes} in place of "
                f"{right_axes}"
            )
            axes = tuple(axis for axis in setting.grid.names if axis in (*right, *wrong))
            found.append(FittingExplanation("wrong divisor", axes, text))
    return found
