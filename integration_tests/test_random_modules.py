"""Covers: random_modules: models, plans and optimizers on four ranks give one device's results."""

from __future__ import annotations

from typing import Any

import pytest
from integration_tests.case_runner import kind
from integration_tests.random_modules import compose, hunt, on_ranks, shrink
from integration_tests.random_modules.hunt import PLAIN
from integration_tests.random_modules.program import Program

SAMPLE = range(1000, 1020)


def failures(seeds: range) -> list[str]:
    return [
        f"program {seed}: {outcome}\n{program.script()}"
        for seed, program, outcome in hunt(seeds)
        if kind(outcome) not in ("", "void", "refused")
    ]


def test_a_program_is_the_same_everywhere_and_prints_itself() -> None:
    program = compose(3)
    assert program == compose(3) != compose(5)
    found: dict[str, Any] = {"__name__": "script"}
    exec(program.script(), found)
    assert found["PROGRAM"] == program


def test_a_program_that_differs_is_found_and_shrunk() -> None:
    wrong = ("Mlp", (8, 8, "gelu", True, 0.0))
    # A row-wise style on local columns that another activation function has made: its input is
    # replicated, not sharded.
    layouts = (
        ("blocks.1.down", "RowwiseParallel()"),
        ("blocks.0.up", "ColwiseParallel(output_layouts=Replicate())"),
    )
    program = Program(
        (4,), (wrong, wrong), (2, 4, 8, 0), "parallelize", layouts, PLAIN, ("zero", "clip:2"), 1
    )
    (found,) = on_ranks([program])
    assert found
    small, said = shrink(program, found)
    assert kind(said) == kind(found)
    assert small.blocks == (wrong,)
    assert small.layouts == (("blocks.0.down", "RowwiseParallel()"),)
    assert not small.features


def test_a_sample_is_right_or_refused() -> None:
    found = failures(SAMPLE)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_many_are_right_or_refused(first: int) -> None:
    found = failures(range(first, first + 250))
    assert not found, "\n".join(found)
