"""Combinations are named.

Covers: analysis/combinations.py, analysis/factors.py, analysis/copies.py, analysis/explanations.py,
analysis/rank_weights.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shoal_lab import CertificationFinding, FittingExplanation
from shoal_lab.analysis.combinations import explain_copies
from shoal_lab.analysis.copies import Expected, RankCopy, Setting
from shoal_lab.analysis.grid import MeshGrid

GRID = MeshGrid.of({"dp": 2, "tp": 3})


def values(seed: int = 0, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (6, 4)), generator=generator, dtype=torch.float64)


def explain(
    by_rank: Callable[[int], Tensor],
    grid: MeshGrid = GRID,
    shards: Mapping[int, slice] | None = None,
    **expected: object,
) -> tuple[FittingExplanation, ...]:
    """Explain what each rank has of the gradient `values()`."""
    whole = values()
    positions = torch.arange(whole.numel()).view(whole.shape)
    copies = list[RankCopy]()
    for rank in range(grid.count):
        index = positions[shards[rank]] if shards else positions
        copies.append(RankCopy(rank, "w", by_rank(rank), index))
    setting = Setting(grid, 1e-9, backwards=4)
    wanted = Expected(whole, **expected)  # type: ignore[arg-type]  # fields of Expected
    return explain_copies(copies, wanted, setting, "gradient")


def parts(axis: str, weights: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Callable[[int], Tensor]:
    """Return summands along an axis, whose weighted sum is the gradient."""
    size = GRID.size_of((axis,))
    summands = [values(seed) for seed in range(10, 10 + size - 1)]
    rest = values() - sum(w * part for w, part in zip(weights, summands, strict=False))
    summands.append(rest / weights[size - 1])
    return lambda rank: summands[GRID.position(rank, axis)]


@dataclass(frozen=True)
class Combination:
    """What ranks have in the place of the gradient, and how it is explained.

    Attributes:
        by_rank: the values of a rank.
        kind: of the explanation.
        axes: of the mesh that the explanation names.
        words: a part of its text.
    """

    by_rank: Callable[[int], Tensor]
    kind: str
    axes: tuple[str, ...]
    words: str


COMBINATIONS = {
    "a sum over tp is missing": Combination(
        parts("tp"), kind="missing reduction", axes=("tp",), words="right after a sum over tp"
    ),
    "a mean over tp is missing": Combination(
        lambda rank: 3 * parts("tp")(rank),
        kind="missing reduction",
        axes=("tp",),
        words="right after a mean over tp",
    ),
    "a sum is missing and the rest is twice as large": Combination(
        lambda rank: 2 * parts("tp")(rank),
        kind="missing reduction",
        axes=("tp",),
        words="after a sum it is 2 times too large",
    ),
    "twice as large": Combination(
        lambda rank: 2 * values(), kind="too large", axes=("dp",), words="2 times too large"
    ),
    "a third": Combination(
        lambda rank: values() / 3, kind="too small", axes=("tp",), words="3 times too small"
    ),
    "six times as large": Combination(
        lambda rank: 6 * values(), kind="too large", axes=("dp", "tp"), words="6 times too large"
    ),
    "four microbatches": Combination(
        lambda rank: 4 * values(), kind="microbatches", axes=(), words="4 microbatches are added"
    ),
    "the size of the other axis": Combination(
        lambda rank: values() * 2 / 3,
        kind="wrong divisor",
        axes=("dp", "tp"),
        words="size of tp in place of dp",
    ),
    "the opposite sign": Combination(
        lambda rank: -values(), kind="sign", axes=(), words="opposite sign"
    ),
    "another scale": Combination(
        lambda rank: 0.37 * values(), kind="scaled", axes=(), words="scaled by 0.37"
    ),
    "zero": Combination(lambda rank: 0 * values(), kind="zero", axes=(), words="zero on all ranks"),
    "zero on a part of dp": Combination(
        lambda rank: values() * (GRID.position(rank, "dp") == 0),
        kind="zero",
        axes=("dp",),
        words="at dp=1",
    ),
    "twice as large on one rank of tp": Combination(
        lambda rank: values() * (2 if GRID.position(rank, "tp") == 1 else 1),
        kind="too large",
        axes=("tp",),
        words="at tp=1",
    ),
    "rows in another order": Combination(
        lambda rank: values()[[1, 0, 2, 3, 4, 5]], kind="permuted", axes=(), words="dim 0"
    ),
    "a sum with weights is missing": Combination(
        parts("tp", (0.5, 2.0, 3.0)),
        kind="missing reduction",
        axes=("tp",),
        words="weights 0.5, 2, 3",
    ),
    "twice as large in rows of one rank of dp": Combination(
        lambda rank: values() * torch.tensor([2.0] * 3 + [1.0] * 3)[:, None],
        kind="too large",
        axes=("dp",),
        words="rows 0-2 of 6",
    ),
    "another factor on each rank": Combination(
        lambda rank: values() * (1.1 + rank),
        kind="scaled",
        axes=("dp", "tp"),
        words="a different factor on each rank",
    ),
    "not a number": Combination(
        lambda rank: values() * torch.nan, kind="missing", axes=(), words="nan"
    ),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination_is_named(name: str) -> None:
    combination = COMBINATIONS[name]
    found = explain(combination.by_rank)
    expected = [(combination.kind, combination.axes)]
    assert [(fits.kind, fits.axes) for fits in found] == expected, found
    assert combination.words in found[0].text


def test_axes_of_one_size_are_both_named() -> None:
    found = explain(lambda rank: 2 * values(), MeshGrid.of({"dp": 2, "tp": 2}))
    assert [fits.axes for fits in found] == [("dp",), ("tp",)]
    sentence = CertificationFinding(0, "gradient", "w", 1.0, explanations=found).sentence()
    assert sentence.startswith("two explanations fit: ")


def test_values_of_an_earlier_step_are_stale() -> None:
    found = explain(lambda rank: values(5), earlier=[values(5), values(6)])
    assert "2 steps before" in found[0].text
    found = explain(lambda rank: values() + values(6), earlier=[values(5), values(6)])
    assert found[0].kind == "not zeroed"
    found = explain(lambda rank: values(7), stale=values(7))
    assert found[0].kind == "stale"


def test_weights_of_microbatches_are_found() -> None:
    microbatches = [values(8), values() - values(8)]
    found = explain(lambda rank: 3 * values(8) + microbatches[1], microbatches=microbatches)
    assert (found[0].kind, found[0].axes) == ("microbatches", ("tp",))
    found = explain(lambda rank: values(8), microbatches=microbatches)
    assert "only the gradients of microbatch 0 are counted" in found[0].text


def test_the_shard_of_another_rank_is_recognized() -> None:
    grid = MeshGrid.of({"tp": 3})
    shards = {0: slice(0, 2), 1: slice(2, 4), 2: slice(4, 6)}
    order = (1, 2, 0)
    found = explain(lambda rank: values()[shards[order[rank]]], grid, shards)
    assert (found[0].kind, found[0].axes) == ("wrong shard", ("tp",))
    assert "rank 0 has the value of rank 1" in found[0].text


def test_shards_are_scaled_as_replicas_are() -> None:
    grid = MeshGrid.of({"tp": 3})
    shards = {0: slice(0, 2), 1: slice(2, 2), 2: slice(2, 6)}
    found = explain(lambda rank: 3 * values()[shards[rank]], grid, shards)
    assert found[0].axes == ("tp",)


def test_unrelated_values_are_not_explained() -> None:
    assert explain(lambda rank: values(20 + rank)) == ()


def test_two_parameters_that_are_one_on_one_device_are_named() -> None:
    whole = values()
    index = torch.arange(whole.numel()).view(whole.shape)
    copies = [
        RankCopy(0, "embed", values(9), index),
        RankCopy(0, "head", whole - values(9), index),
    ]
    found = explain_copies(
        copies, Expected(whole), Setting(MeshGrid.of({"dp": 1}), 1e-9), "gradient"
    )
    assert found[0].kind == "copies"
    assert "embed and head are one tied parameter" in found[0].text


@pytest.mark.parametrize(
    ("relation", "words"), [("mean", "mean taken as sum"), ("equal", "reduced twice")]
)
def test_losses_tell_a_sum_from_a_second_reduction(relation: str, words: str) -> None:
    whole = values()
    index = torch.arange(whole.numel()).view(whole.shape)
    copies = [RankCopy(rank, "w", 2 * whole, index) for rank in range(2)]
    setting = Setting(MeshGrid.of({"dp": 2}), 1e-9, loss_by_axis={"dp": relation})
    found = explain_copies(copies, Expected(whole), setting, "gradient")
    assert found[0].text == f"2 times too large: {words} over dp"
