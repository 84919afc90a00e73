"""Covers: lab/*.py: collectives on ranks of a lab against gloo, for both isolations."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import collective_programs as programs
from shoal_mesh.lab import lab
from shoal_mesh.local_ranks.pool import RankPool

ISOLATIONS = ("thread", "process")
isolations = pytest.mark.parametrize("isolation", ISOLATIONS)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@cache
def results_of_gloo() -> list[dict[str, list[Any]]]:
    with RankPool(4, backend="gloo") as pool:
        return pool.run(programs.run_all)


@cache
def results_of_lab(isolation: Any) -> list[dict[str, list[Any]]]:
    return lab(4, isolation).run(programs.run_all)


@isolations
@pytest.mark.parametrize("name", [program.__name__ for program in programs.PROGRAMS])
def test_collectives_have_the_values_of_gloo(name: str, isolation: str) -> None:
    expected = [results[name] for results in results_of_gloo()]
    assert [results[name] for results in results_of_lab(isolation)] == expected
