"""Covers: lab/rank_state.py: `RandomStates`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from shoal_mesh.lab.rank_state import RandomStates


def draw() -> list[Any]:
    """Draw a number from each generator."""
    return [torch.rand(()).item(), random.random(), np.random.rand()]


def test_restored_states_draw_the_same_numbers_again() -> None:
    before_test = RandomStates.capture()
    states = RandomStates.capture()
    first = draw()
    second = draw()
    states.restore()
    assert [draw(), draw()] == [first, second]
    assert all(a != b for a, b in zip(first, second, strict=True))
    before_test.restore()


def test_a_seed_determines_all_generators() -> None:
    before_test = RandomStates.capture()
    RandomStates.seed(3)
    first = draw()
    RandomStates.seed(4)
    other = draw()
    RandomStates.seed(3)
    assert draw() == first
    assert all(a != b for a, b in zip(first, other, strict=True))
    before_test.restore()
