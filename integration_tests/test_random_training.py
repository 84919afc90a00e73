"""Covers: random_training: data-parallel steps on four ranks have the results of one device."""

from __future__ import annotations

import pytest
from integration_tests.case_runner import kind, run_cases
from integration_tests.random_training import compose, stops, verdict
from integration_tests.random_training.edges import draw_edges, verdict_with_edges
from integration_tests.random_training.fresh import draw_fresh_resume, verdicts_of_fresh_resumes
from integration_tests.random_training.stops import (
    PLACES,
    Stop,
    draw_stop,
    verdict_of_stop,
)


@pytest.mark.parametrize(
    "first", [0, 25, *(pytest.param(n, marks=pytest.mark.slow) for n in range(50, 200, 25))]
)
def test_programs_are_what_they_are_on_one_device(first: int) -> None:
    programs = [compose(seed) for seed in range(first, first + 25)]
    outcomes = {
        program.seed: outcome
        for program, outcome in zip(programs, run_cases(verdict, programs), strict=True)
    }
    assert {
        seed: outcome for seed, outcome in outcomes.items() if kind(outcome) not in ("", "void")
    } == {}
    assert sum(kind(outcome) == "void" for outcome in outcomes.values()) < 5


@pytest.mark.parametrize(
    "count", [pytest.param(4, id="few"), pytest.param(50, id="many", marks=pytest.mark.slow)]
)
def test_programs_go_on_in_new_processes(count: int) -> None:
    resumes = [draw_fresh_resume(seed) for seed in range(3, 3 + count)]
    # new processes on as many ranks, and on fewer
    assert {resume.ranks for resume in resumes} == {2, 4}
    outcomes = verdicts_of_fresh_resumes(resumes)
    assert [outcome for outcome in outcomes if kind(outcome) not in ("", "void")] == []
    assert "" in outcomes


@pytest.mark.parametrize(
    "count", [pytest.param(8, id="few"), pytest.param(100, id="many", marks=pytest.mark.slow)]
)
def test_programs_with_edges_are_what_they_are_on_one_device(count: int) -> None:
    edges = [draw_edges(compose(seed)) for seed in range(count)]
    for name in ("outside", "passed", "around", "watched", "half"):
        assert any(getattr(each, name) for each in edges), name
    outcomes = run_cases(verdict_with_edges, edges)
    assert [outcome for outcome in outcomes if kind(outcome) not in ("", "void")] == []
    assert "" in outcomes


SLOW_PLACES = [pytest.param(p, marks=pytest.mark.slow) for p in PLACES if p != "backward"]


@pytest.mark.parametrize("place", ["backward", *SLOW_PLACES])
def test_ranks_do_not_wait_for_one_that_raises(place: str) -> None:
    program = next(p for p in map(compose, range(100)) if p.resume is not None)
    assert verdict_of_stop(program, Stop(2, 0, place, 0, raises=True)) == ""


def test_ranks_do_not_wait_for_one_that_returns() -> None:
    assert verdict_of_stop(compose(1), Stop(1, 0, "gradients", 0, raises=False)) == ""


@pytest.mark.parametrize("outcome", ["void: ValueError: empty", "hang: mesh.py:1 f", "wrong: norm"])
def test_a_stop_has_the_outcome_of_a_program_that_fails_without_it(
    outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "run_cases", lambda *_: [outcome])
    assert verdict_of_stop(compose(1), Stop(1, 0, "gradients", 0, raises=False)) == outcome


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ranks_do_not_wait_for_one_that_stops() -> None:
    programs = [compose(seed) for seed in range(50)]
    outcomes = [verdict_of_stop(program, draw_stop(program)) for program in programs]
    assert [outcome for outcome in outcomes if kind(outcome) not in ("", "void")] == []
