"""Covers: programs of the hunts that give right values pass the checker of types in global mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from integration_tests import random_modules, random_training
from integration_tests.case_runner import run_cases
from integration_tests.random_modules import Program
from integration_tests.random_modules.typed import type_error
from integration_tests.random_modules.verdict import verdict
from integration_tests.random_training.typed import type_error as type_error_of_training

BLOCK = ("Mlp", (8, 8, "gelu", True, 0.0))


def false_alarms(
    programs: Sequence[Any],
    check: Callable[[Any], str | None],
    verdict_of: Callable[[Any], str],
) -> list[str]:
    """Errors of the checker about programs that have the values of one device on four ranks."""
    errors = [(program, check(program)) for program in programs]
    passed = sum(error == "" for _, error in errors)
    # the others are refused, by a style, an optimizer or DTensor
    assert passed > len(programs) / 2, f"{passed} of {len(programs)} ran to the end of a forward"
    rejected = [(program, error) for program, error in errors if error]
    values = run_cases(verdict_of, [program for program, _ in rejected])
    return [
        f"{error}\n{program}"
        for (program, error), wrong in zip(rejected, values, strict=True)
        if not wrong
    ]


def test_a_wrong_program_has_a_type_error() -> None:
    # The row-wise style takes local columns, and the other style gives it whole activations.
    layouts = (
        ("blocks.0.up", "ColwiseParallel(output_layouts=Replicate())"),
        ("blocks.0.down", "RowwiseParallel()"),
    )
    optimizer = "torch.optim.SGD(groups, lr=0.01)"
    program = Program((4,), (BLOCK,), (2, 4, 8, 0), "parallelize", layouts, optimizer)
    assert "the tensor is I over tp, but the source type is S(2)" in (type_error(program) or "")


def modules(first: int, count: int) -> list[Program]:
    return [random_modules.compose(seed) for seed in range(first, first + count)]


def trainings(first: int, count: int) -> list[random_training.Program]:
    return [random_training.compose(seed) for seed in range(first, first + count)]


@pytest.mark.filterwarnings("ignore")
def test_a_sample_has_no_false_alarm() -> None:
    styled = [program for program in modules(1000, 30) if program.plan != "distribute"]
    assert false_alarms(styled, type_error, verdict) == []
    assert false_alarms(trainings(0, 12), type_error_of_training, random_training.verdict) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(2000, 3000, 200))
def test_many_have_no_false_alarm(first: int) -> None:
    assert false_alarms(modules(first, 200), type_error, verdict) == []
    found = trainings(first, 200)
    assert false_alarms(found, type_error_of_training, random_training.verdict) == []
