"""Models and optimizers that are replaced.

Covers: observe/earlier_parameters.py, observe/observer.py.

Covers: observe/roots.py, analysis/placing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import replaced_programs as programs
from shoal_lab import certify

MESH = {"dp": 2, "tp": 2}


# The counts include the parameters, gradients and states of every model that was trained.
@pytest.mark.parametrize(
    ("program", "compared"),
    [
        (programs.compiled_after_a_step, 128),
        (programs.copied_model, 168),
        (programs.grown_model, 168),
        (programs.replaced_layer, 200),
        (programs.layer_replaced_in_place, 182),
        (programs.moving_average, 104),
        (programs.optimizer_for_each_step, 240),
    ],
)
def test_a_correct_program_raises_no_alarm(program: Callable[[Any], Any], compared: int) -> None:
    report = certify(program, meshes=[MESH], shrink=False)
    assert report.passed, str(report)
    assert report.results[0].compared == compared
    assert not report.results[0].not_compared


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (
            programs.grown_model_not_reduced,
            "step 1: gradient of 0.norm.weight #2, 0.norm.bias #2: missing all-reduce over tp",
        ),
        (
            programs.replaced_layer_by_rank,
            "parameter of 1.weight, 1.bias: differs at dp=1, which did not get the values",
        ),
        (
            programs.state_of_another_rank,
            "step 1: optimizer state exp_avg of 0.up.weight, 0.up.bias, 0.down.weight: shards in "
            "another order",
        ),
    ],
)
def test_a_mistake_after_the_replacement_is_named(program: Callable[[Any], Any], line: str) -> None:
    assert line in str(certify(program, meshes=[MESH], shrink=False))
