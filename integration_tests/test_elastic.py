"""Covers: elastic.py: training goes on after kills, on the survivors, to the losses of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration_tests.elastic import compare, plot, run


def test_losses_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    undisturbed = run(str(tmp_path / "undisturbed"), 4, 0)
    disturbed = run(str(tmp_path / "disturbed"), 4, 2)
    assert (undisturbed.sizes, disturbed.sizes) == ([4], [4, 3, 2])
    assert [*undisturbed.losses] == [0, 1, 2, 3]
    assert compare(disturbed.losses, undisturbed.losses) < 1e-9
    assert len(disturbed.pauses) == 2 and all(0 < pause < 60 for pause in disturbed.pauses)
    plot(disturbed.usage, tmp_path / "usage.svg")
    assert (tmp_path / "usage.svg").read_text().count("<polyline") == 6


def test_other_losses_are_refused() -> None:
    with pytest.raises(AssertionError, match="differ by"):
        compare({0: 1.0}, {0: 1.1})
