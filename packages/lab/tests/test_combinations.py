"""Combinations are named.

Covers: analysis/combinations.py, analysis/factors.py, analysis/copies.py, analysis/explanations.py,
analysis/rank_weights.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from shoal_lab.analysis.combinations import explain_copies
from shoal_lab.analysis.copies import Expected, RankCopy, Setting
from shoal_lab.analysis.explanations import CertificationFinding, FittingExplanation
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


@pytest.mark.parametrize(
    ("by_rank", "kind", "axes", "words"),
    [
        (parts("tp"), "missing reduction", ("tp",), "right after a sum over tp"),
        (
            lambda rank: 3 * parts("tp")(rank),
            "missing reduction",
            ("tp",),
            "right after a mean over tp",
        ),
        (
            lambda rank: 2 * parts("tp")(rank),
            "missing reduction",
            ("tp",),
            "after a sum it is 2 times too large",
        ),
        (lambda rank: 2 * values(), "too large", ("dp",), "2 times too large"),
        (lambda rank: values() / 3, "too small", ("tp",), "3 times too small"),
        (lambda rank: 6 * values(), "too large", ("dp", "tp"), "6 times too large"),
        (lambda rank: 4 * values(), "microbatches", (), "4 microbatches are added"),
        (lambda rank: values() * 2 / 3, "wrong divisor", ("dp", "tp"), "size of tp in place of dp"),
        (lambda rank: -values(), "sign", (), "opposite sign"),
        (lambda rank: 0.37 * values(), "scaled", (), "scaled by 0.37"),
        (lambda rank: 0 * values(), "zero", (), "zero on all ranks"),
        (lambda rank: values() * (GRID.position(rank, "dp") == 0), "zero", ("dp",), "at dp=1"),
        (
            lambda rank: values() * (2 if GRID.position(rank, "tp") == 1 else 1),
            "too large",
            ("tp",),
            "at tp=1",
        ),
        (lambda rank: values()[[1, 0, 2, 3, 4, 5]], "permuted", (), "dim 0"),
        (parts("tp", (0.5, 2.0, 3.0)), "missing reduction", ("tp",), "weights 0.5, 2, 3"),
        (
            lambda rank: values() * torch.tensor([2.0] * 3 + [1.0] * 3)[:, None],
            "too large",
            ("dp",),
            "rows 0-2 of 6",
        ),
        (
            lambda rank: values() * (1.1 + rank),
            "scaled",
            ("dp", "tp"),
            "a different factor on each rank",
        ),
        (lambda rank: values() * torch.nan, "missing", (), "nan"),
    ],
)  # fmt: skip
def test_a_combination_is_named(
    by_rank: Callable[[int], Tensor], kind: str, axes: tuple[str, ...], words: str
) -> None:
    found = explain(by_rank)
    assert [(fits.kind, fits.axes) for fits in found] == [(kind, axes)], found
    assert words in found[0].text


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
