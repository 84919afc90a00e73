"""Covers: analysis/masks.py, analysis/losses.py, analysis/clipping.py, observe/dropout.py."""

from __future__ import annotations

import pytest
import torch

from shoal_lab.analysis.clipping import explain_clip
from shoal_lab.analysis.copies import RankCopy, Setting
from shoal_lab.analysis.grid import MeshGrid
from shoal_lab.analysis.losses import explain_losses, relate_losses
from shoal_lab.analysis.masks import compare_masks
from shoal_lab.records import LocalValue, MaskDraw, RankRecord, StepRecord

GRID = MeshGrid.of({"dp": 2})


def drawn(values: int, mask: int, bits: int = 64) -> RankRecord:
    return RankRecord(masks=[MaskDraw(f"drop ({bits})", values, mask)])


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ((drawn(1, 5), drawn(2, 5)), "dropout alike on all ranks of dp, whose inputs differ"),
        ((drawn(1, 5), drawn(1, 6)), "dropout differs over dp, whose ranks have equal inputs"),
        ((drawn(1, 5), drawn(2, 6)), ""),
        ((drawn(1, 5), drawn(1, 5)), ""),
        # four bits are alike by chance
        ((drawn(1, 5, 4), drawn(2, 5, 4)), ""),
    ],
)
def test_masks_are_as_alike_as_inputs(records: tuple[RankRecord, RankRecord], text: str) -> None:
    found = compare_masks(records, GRID)
    assert [finding.explanations[0].text for finding in found] == ([text] if text else [])


def test_the_law_of_shoal_is_not_judged_by_masks() -> None:
    records = [drawn(1, 5), drawn(2, 5)]
    records[0].uses_shoal = True
    assert compare_masks(records, GRID) == []


@pytest.mark.parametrize(
    ("losses", "relation"),
    [((1.0, 3.0), "mean"), ((0.5, 1.5), "sum"), ((2.0, 2.0), "equal"), ((1.0, 5.0), "")],
)
def test_losses_give_the_loss_of_one_device(losses: tuple[float, ...], relation: str) -> None:
    steps = [StepRecord(losses=[loss]) for loss in losses]
    relations = relate_losses(steps, StepRecord(losses=[2.0]), GRID)
    assert relations.get("dp", "") == relation


def test_uneven_counts_explain_a_mean_of_means() -> None:
    steps = [StepRecord(losses=[1.0], counts=[3]), StepRecord(losses=[3.0], counts=[1])]
    (found,) = explain_losses(steps, StepRecord(losses=[1.5]), GRID)
    assert found.axes == ("dp",)
    assert "3, 1 targets" in found.text
    assert explain_losses(steps, StepRecord(losses=[2.0]), GRID) == ()


def test_norms_of_local_shards_explain_the_factors() -> None:
    whole = torch.arange(1.0, 9.0, dtype=torch.float64)
    index = torch.arange(8).view(2, 4)
    wholes = {"a": LocalValue(whole), "b": LocalValue(2 * whole)}
    norm = float(torch.cat([whole, 2 * whole]).norm())
    copies = dict[str, list[RankCopy]]()
    for name, value in wholes.items():
        for rank in range(2):
            local = float((5**0.5) * whole[index[rank]].norm())
            part = value.tensor[index[rank]] * norm / local
            copies.setdefault(name, []).append(RankCopy(rank, name, part, index[rank]))
    (found,) = explain_clip(copies, wholes, StepRecord(), Setting(GRID, 1e-9))
    assert found.axes == ("dp",)
    assert "local clip norm: missing all-reduce of the squared norm over dp" in found.text
