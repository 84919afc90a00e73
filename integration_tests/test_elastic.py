"""Covers: elastic.py: after kills, survivors continue with the losses of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration_tests.elastic import MOMENTS, Kill, compare, planned, plot, run


@pytest.mark.timeout(240)
def test_losses_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    kills = (Kill(1, MOMENTS[2], 3), Kill(2, MOMENTS[0], 0), Kill(4, MOMENTS[1], 1))
    undisturbed = run(str(tmp_path / "undisturbed"), 6)
    disturbed = run(str(tmp_path / "disturbed"), 6, kills)
    assert [*undisturbed.losses] == [0, 1, 2, 3, 4, 5] and undisturbed.worlds == [(4, "nothing")]
    # Of 2 x 2 and of 3 x 1 ranks the others hold all shards, of 1 x 2 they do not.
    assert disturbed.worlds[:4] == [(4, "nothing"), (3, "memory"), (2, "memory"), (1, "checkpoint")]
    # newcomers may come after the last step
    assert all(source != "nothing" for _, source in disturbed.worlds[4:])
    assert compare(disturbed.losses, undisturbed.losses) < 1e-9
    assert len(disturbed.pauses) == 3 and all(0 < pause < 60 for pause in disturbed.pauses)
    plot(disturbed.usage, tmp_path / "usage.svg")
    assert (tmp_path / "usage.svg").read_text().count("<polyline") == 6


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_agents_of_torchrun_start_what_was_killed_again(tmp_path: Path) -> None:
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    undisturbed = run(str(tmp_path / "undisturbed"), 40)
    disturbed = run(
        str(tmp_path / "disturbed"),
        40,
        (Kill(2, MOMENTS[1], 1), Kill(20, MOMENTS[2], 0)),
        torchrun=True,
    )
    sizes = [size for size, _ in disturbed.worlds]
    assert sizes[:2] == [4, 3] and 4 in sizes[2:]  # one is lost, and comes back
    assert compare(disturbed.losses, undisturbed.losses) < 1e-9 and len(disturbed.pauses) == 2


def test_kills_are_planned_once_a_step() -> None:
    kills = planned(9, 8, 0)
    assert sorted(kill.step for kill in kills) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert kills == planned(9, 8, 0) != planned(9, 8, 1)


def test_other_losses_are_refused() -> None:
    with pytest.raises(AssertionError, match="differ by"):
        compare({0: 1.0}, {0: 1.1})
