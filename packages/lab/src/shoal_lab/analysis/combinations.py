"""`explain_copies`: the computations that connect the values of ranks with the right values.

The right values are those of a reference run, the same program on one device. A hypothesis is a
computation that would make them equal to the values of every rank, such as a factor, or a sum of
the ranks' values over an axis. Families of hypotheses are tried from simple to general. All fits of
the first family with a fit are returned.

The types are in `copies`. A `RankCopy` has the `values` of one rank, and as `index` the position of
each of its elements in the flattened tensor of the reference run. `Expected` has this tensor at the
step under analysis (`now`) and at earlier steps. `Setting` has the mesh (`grid`) and the allowed
differences: `tolerance` is relative, `floor` is absolute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isclose

import torch
from torch import Tensor

from shoal_mesh.internal import missing_all_reduce

from .copies import (
    Expected,
    RankCopy,
    Setting,
    are_multiples,
    best_factor,
    fit,
    is_right,
    sum_over,
)
from .explanations import FittingExplanation
from .factors import ON_ALL_RANKS, name_factor
from .find_index import find_index, match_rows
from .rank_weights import scale_ranks, weigh_ranks

_Hypothesis = Callable[[Sequence[RankCopy], Expected, Setting, str], list[FittingExplanation]]


def explain_copies(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> tuple[FittingExplanation, ...]:
    """Explain copies of which at least one is wrong.

    Args:
        copies: the values of one logical tensor on the ranks.
        expected: the values of the tensor in the reference run.
        setting: the mesh and the allowed differences.
        quantity: the kind of tensor, such as "gradient" or "parameter".

    Returns:
        All explanations of the first family of hypotheses that fits; () if none does.
    """
    families: tuple[_Hypothesis, ...] = (
        _not_finite,
        _tied_copies,
        _zero_everywhere,
        _same_factor,
        _sums_over_axes,
        _stale,
        _microbatches,
        _wrong_shard,
        _find_permutation,
        _some_ranks,
        _some_rows,
        weigh_ranks,
        scale_ranks,
    )
    for family in families:
        found = family(copies, expected, setting, quantity)
        if found:
            return tuple(found)
    return ()


def _not_finite(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Name the ranks that have nan or infinite elements."""
    ranks = [copy.rank for copy in copies if not copy.values.isfinite().all()]
    if not ranks or not expected.now.isfinite().all():
        return []
    axes, ranks_text = describe_ranks(ranks, [copy.rank for copy in copies], setting)
    # of the kind "missing", because there is no number to compare
    return [FittingExplanation("missing", axes, f"nan or infinite {ranks_text}")]


def _tied_copies(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Add up the parameters of each rank that are one tied parameter in the reference run."""
    names = sorted({copy.name for copy in copies})
    # by rank and position of the first element, or -1 for an empty shard
    by_place = dict[tuple[int, int], list[RankCopy]]()
    for copy in copies:
        first = int(copy.index.flatten()[0]) if copy.index.numel() else -1
        by_place.setdefault((copy.rank, first), []).append(copy)
    most_copies = max(map(len, by_place.values()), default=0)
    if len(names) < 2 or most_copies == 1:
        return []
    totals = list[RankCopy]()
    for group in by_place.values():
        total = torch.stack([copy.values for copy in group]).sum(0)
        totals.append(RankCopy(group[0].rank, group[0].name, total, group[0].index))
    if not is_right(totals, expected.now, setting):
        return []
    tied = " and ".join(names)
    text = (
        f"{tied} are one tied parameter on one device, but on the ranks their {quantity}s are not "
        "added"
    )
    return [FittingExplanation("copies", (), text)]


def _zero_everywhere(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Find a value that is zero on all ranks."""
    if any(float(copy.values.norm()) > setting.floor for copy in copies):
        return []
    return [
        FittingExplanation(
            "zero", (), f"the {quantity} is zero on all ranks: it was never computed"
        )
    ]


def _same_factor(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Find one factor for all ranks."""
    factor = best_factor(copies, expected.now, setting)
    if not factor:
        return []
    explanations = name_factor(factor, setting, quantity)
    # By chance, one or two elements are easily a multiple of the expected elements.
    is_vague = expected.now.numel() < 3 and explanations[0].kind == "scaled"
    return [] if is_vague else explanations


def _sums_over_axes(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Sum the values of ranks along axes, and find sums that are right.

    A sum that is right but for a factor fits too, if `name_factor` has a cause for the factor.
    """
    if quantity not in ("gradient", "output", "returned value"):
        return []
    if are_multiples(copies, expected.now, setting):
        # sums of multiples of one value are multiples too, so any sum would fit
        return []
    found = list[FittingExplanation]()
    # Small sets of axes come first. After a fit, larger sets are not tried.
    fewest = len(setting.grid.names)
    for axes in setting.grid.subsets():
        if len(axes) > fewest:
            break
        summed = sum_over(copies, axes, setting.grid)
        if summed is None:
            continue
        factor = best_factor(summed, expected.now, setting)
        if not factor:
            continue
        texts = _describe_sum(axes, factor, setting, quantity)
        if texts:
            fewest = len(axes)
            found += texts
    return found


def _describe_sum(
    axes: tuple[str, ...], factor: float, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Describe a sum over axes that is `factor` times the expected value.

    The list is empty if the factor has no cause.
    """
    over = ", ".join(axes)
    slack = max(1e-6, 10 * setting.tolerance)
    count = setting.grid.size_of(axes)
    if isclose(factor, 1, rel_tol=slack):
        return [FittingExplanation("missing reduction", axes, missing_all_reduce(axes))]
    if isclose(factor, count, rel_tol=slack):
        # The sum divided by the number of ranks is right: the ranks should have averaged.
        return [FittingExplanation("missing reduction", axes, missing_all_reduce(axes, "mean"))]
    found = list[FittingExplanation]()
    for number, operation in ((factor, "sum"), (factor / count, "mean")):
        for explanation in name_factor(number, setting, quantity):
            if explanation.kind == "scaled":
                continue
            text = f"missing all-reduce over {over}; after a {operation} it is {explanation.text}"
            found.append(FittingExplanation("missing reduction", axes, text))
    # One text for each set of axes is enough: a cause after a sum, or else after a mean.
    return found[:1]


def _stale(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Compare with values of earlier steps, and with sums of the values of the last two steps."""
    for age, earlier in enumerate(reversed(expected.earlier), 1):
        if is_right(copies, earlier, setting):
            steps = "1 step" if age == 1 else f"{age} steps"
            text = f"stale: the {quantity} equals the value of {steps} before"
            return [FittingExplanation("stale", (), text)]
    if expected.stale is not None and is_right(copies, expected.stale, setting):
        text = (
            "stale: computed with the parameters of the step before, as if weights were gathered "
            "only once"
        )
        return [FittingExplanation("stale", (), text)]
    if not expected.earlier:
        return []
    # the factors of the two values in a sum that gives the values of all ranks; None if none does
    coefficients = fit(copies, [expected.now, expected.earlier[-1]], setting)
    if coefficients is None or isclose(coefficients[1], 0, abs_tol=1e-9):
        return []
    now, before = coefficients
    if isclose(now, 1, rel_tol=1e-6) and isclose(before, 1, rel_tol=1e-6):
        text = (
            f"not zeroed: the sum of this step's {quantity} and the {quantity} of the step before"
        )
        return [FittingExplanation("not zeroed", (), text)]
    # Any other part of the value before also means that it was kept, and perhaps scaled.
    text = (
        f"{now:.4g} times this step's {quantity} plus {before:.4g} times the value of the step "
        "before"
    )
    return [FittingExplanation("not zeroed", (), text)]


def _microbatches(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Find weights of the gradients of the microbatches."""
    if quantity != "gradient" or len(expected.microbatches) < 2:
        return []
    coefficients = fit(copies, expected.microbatches, setting)
    if coefficients is None or max(coefficients) - min(coefficients) < 1e-6:
        return []
    weights = ", ".join(f"{coefficient:.4g}" for coefficient in coefficients)
    distances = [min(abs(value), abs(value - 1)) for value in coefficients]
    are_zero_or_one = max(distances) < 1e-6
    if are_zero_or_one:
        kept = [str(number) for number, value in enumerate(coefficients) if value > 0.5]
        text = (
            f"only the gradients of microbatch {', '.join(kept)} are counted: the weights are "
            f"{weights}"
        )
        return [FittingExplanation("microbatches", (), text)]
    axes = _axes_of_weights(coefficients, setting)
    cause = f": reduced again over {', '.join(axes)} with each microbatch" if axes else ""
    text = f"microbatches have the weights {weights} instead of equal weights{cause}"
    return [FittingExplanation("microbatches", axes, text)]


def _axes_of_weights(weights: Sequence[float], setting: Setting) -> tuple[str, ...]:
    """Return the axes over which gradients were reduced again with each microbatch; () if unclear.

    Example: if gradients of earlier microbatches are in the buffer that is summed over dp=2 after
    each microbatch, three microbatches have the weights 4, 2, 1. The ratio of neighbors is the size
    of dp. If the sizes of several sets of axes fit, none of them is returned.
    """
    ratios = [before / after for before, after in pairwise(weights) if after]
    fitting = list[tuple[str, ...]]()
    for axes in setting.grid.subsets():
        size = setting.grid.size_of(axes)
        if ratios and all(isclose(ratio, size, rel_tol=1e-6) for ratio in ratios):
            fitting.append(axes)
    return fitting[0] if len(fitting) == 1 else ()


def _wrong_shard(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Compare each rank with the shards of the other ranks."""
    # rank with a wrong value -> rank whose shard it has
    owner_of_shard = dict[int, int]()
    for copy in copies:
        if setting.is_close(copy.values, copy.part_of(expected.now)):
            continue
        owner = _owner_of(copy, copies, expected.now, setting)
        if owner is None:
            return []
        owner_of_shard[copy.rank] = owner
    if not owner_of_shard:
        return []
    pairs_of_ranks = list(owner_of_shard.items())
    axes = _axes_between(pairs_of_ranks, setting)
    texts = [f"rank {rank} has the value of rank {other}" for rank, other in pairs_of_ranks]
    pairs = ", ".join(texts)
    over = f" over {', '.join(axes)}" if axes else ""
    return [FittingExplanation("wrong shard", axes, f"shards in another order{over}: {pairs}")]


def _owner_of(
    copy: RankCopy, copies: Sequence[RankCopy], whole: Tensor, setting: Setting
) -> int | None:
    """Return the first rank whose shard of the whole tensor has the values of a copy, or None."""
    for other in copies:
        fits = other.values.shape == copy.values.shape
        if fits and setting.is_close(copy.values, other.part_of(whole)):
            return other.rank
    return None


def _axes_between(pairs: Sequence[tuple[int, int]], setting: Setting) -> tuple[str, ...]:
    """Return the axes along which the ranks of any pair differ."""
    grid = setting.grid
    differing = set[str]()
    for one, other in pairs:
        for axis in grid.names:
            if grid.position(one, axis) != grid.position(other, axis):
                differing.add(axis)
    return tuple(axis for axis in grid.names if axis in differing)


def _find_permutation(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Find the elements of wrong ranks in another order in their shard, or in the whole tensor."""
    if expected.now.ndim < 2:
        return []
    slack = setting.tolerance * float(expected.now.abs().max()) + setting.floor
    wrong = list[RankCopy]()
    dims = set[int]()
    for copy in copies:
        part = copy.part_of(expected.now)
        if setting.is_close(copy.values, part):
            continue
        wrong.append(copy)
        dim = _permuted_dim(copy.values, part, slack)
        if dim is None and find_index(copy.values, expected.now, slack) is None:
            return []
        if dim is not None:
            dims.add(dim)
    if not wrong:
        return []
    # of all ranks, because a wrong rank alone does not show along which axes shards differ
    axes = sharded_axes(copies, setting)
    # Along several dims, or with elements of other shards, no single dim is permuted.
    place = f"dim {dims.pop()}" if len(dims) == 1 else "the whole tensor"
    order = "in a different order than on one device"
    return [FittingExplanation("permuted", axes, f"permuted: the slices of {place} are {order}")]


def _permuted_dim(values: Tensor, part: Tensor, slack: float) -> int | None:
    """Return the dim along which `values` is a permutation of `part`; None if there is none."""
    for dim in range(values.ndim):
        rows = match_rows(values.movedim(dim, 0), part.movedim(dim, 0), slack)
        if rows is not None:
            return dim
    return None


def sharded_axes(copies: Sequence[RankCopy], setting: Setting) -> tuple[str, ...]:
    """Return the axes along which ranks have different elements."""
    by_rank = {copy.rank: copy for copy in copies}
    sharded = list[str]()
    for axis in setting.grid.names:
        for ranks in setting.grid.groups((axis,)):
            group = [by_rank[rank] for rank in ranks if rank in by_rank]
            indices = [copy.index for copy in group]
            if not all(torch.equal(one, other) for one, other in pairwise(indices)):
                sharded.append(axis)
                break
    return tuple(sharded)


def _some_ranks(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Explain the wrong ranks alone, if other ranks are right."""
    wrong = list[RankCopy]()
    for copy in copies:
        if not setting.is_close(copy.values, copy.part_of(expected.now)):
            wrong.append(copy)
    if len(wrong) == len(copies):
        return []
    wrong_ranks = [copy.rank for copy in wrong]
    axes, ranks_text = describe_ranks(wrong_ranks, [copy.rank for copy in copies], setting)
    if _zero_everywhere(wrong, expected, setting, quantity):
        over = f", or missing all-reduce over {axes[0]}" if axes else ""
        text = f"the {quantity} is zero {ranks_text}: it was never computed there{over}"
        return [FittingExplanation("zero", axes, text)]
    for family in (_same_factor, _stale, _microbatches):
        explanations = family(wrong, expected, setting, quantity)
        if explanations:
            first = explanations[0]
            text = f"{first.text.removesuffix(ON_ALL_RANKS)} {ranks_text}"
            return [FittingExplanation(first.kind, axes or first.axes, text)]
    # Parameters are replicated by sending the values of one rank to the others. Values of another
    # kind are computed by each rank, so they may differ for many reasons.
    if quantity != "parameter":
        return []
    text = f"differs {ranks_text}, which did not get the values of the other ranks"
    return [FittingExplanation("some ranks", axes, text)]


def describe_ranks(
    ranks: Sequence[int], all_ranks: Sequence[int], setting: Setting
) -> tuple[tuple[str, ...], str]:
    """Describe ranks by their coordinates on one axis if no other ranks have these coordinates.

    Returns:
        The axis, or (), and a text such as `at dp=1` or `on ranks 0, 3`.
    """
    others = sorted(set(all_ranks) - set(ranks))
    for axis in setting.grid.names:
        inside = {setting.grid.position(rank, axis) for rank in ranks}
        outside = {setting.grid.position(rank, axis) for rank in others}
        if others and not inside & outside:
            return (axis,), f"at {axis}={', '.join(map(str, sorted(inside)))}"
    return (), f"on ranks {', '.join(map(str, sorted(set(ranks))))}"


def _some_rows(
    copies: Sequence[RankCopy], expected: Expected, setting: Setting, quantity: str
) -> list[FittingExplanation]:
    """Explain the wrong rows (slices of dim 0) alone, if other rows are right."""
    whole = expected.now
    if whole.ndim < 1 or whole.shape[0] < 4:
        return []
    # The squared difference of each element, added over the ranks that have the element.
    squares = torch.zeros(whole.numel(), dtype=torch.float64)
    for copy in copies:
        difference = (copy.values - copy.part_of(whole)).square().flatten()
        squares.index_put_((copy.index.flatten(),), difference, accumulate=True)
    by_row = squares.view(whole.shape[0], -1).sum(1).sqrt()
    allowed = setting.tolerance * float(whole.norm()) + setting.floor
    is_wrong = by_row > allowed
    count = int(is_wrong.sum())
    # any hypothesis may fit a few elements of a vector by chance
    fewest = 4 if whole.ndim == 1 else 1
    if count == whole.shape[0] or count < fewest:
        return []
    width = whole[0].numel()
    wrong_copies = list[RankCopy]()
    for copy in copies:
        selected = is_wrong[copy.index // width]
        values = copy.values[selected]
        wrong_copies.append(RankCopy(copy.rank, copy.name, values, copy.index[selected]))
    wrong_copies = [copy for copy in wrong_copies if copy.values.numel()]
    rows = _describe_runs(is_wrong.nonzero()[:, 0].tolist())
    for family in (_zero_everywhere, _same_factor, _sums_over_axes, _stale, _microbatches):
        found = list[FittingExplanation]()
        for explanation in family(wrong_copies, expected, setting, quantity):
            text = f"rows {rows} of {whole.shape[0]}: {explanation.text}"
            found.append(FittingExplanation(explanation.kind, explanation.axes, text))
        if found and found[0].kind != "scaled":
            return found
    return []


def _describe_runs(numbers: Sequence[int]) -> str:
    """Write ascending integers as runs: 0-3, 8-11."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(start) if start == stop else f"{start}-{stop}" for start, stop in runs]
    return ", ".join(texts[:6]) + (", ..." if len(texts) > 6 else "")
