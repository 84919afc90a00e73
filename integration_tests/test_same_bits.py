"""Covers: integration_tests/same_bits.py: models train with the same bits on any mesh."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from integration_tests.same_bits import MODELS, RUNS, compare

DTYPES = [torch.float32, torch.bfloat16]
MODELS_HERE = [kind for kind in MODELS if kind != "hf" or find_spec("transformers")]


@pytest.mark.parametrize("kind", MODELS_HERE)
def test_two_steps_on_two_meshes(kind: str) -> None:
    runs = [((1, 4), True, False), ((2, 2), False, True)]
    assert compare(kind, torch.float32, 2, runs) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MODELS_HERE)
def test_fifty_steps_on_every_mesh(kind: str, dtype: torch.dtype) -> None:
    assert compare(kind, dtype, 50, RUNS) == []
