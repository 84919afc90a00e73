"""Ranks that make different modules parallel.

Covers: plan/parallelize.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shoal_mesh import CommDebugMode, LockstepError
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import ColwiseParallel, parallelize_module


def frozen_on_one() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.requires_grad_(all_ranks().get_rank() == 0)
    return model


def wider_on_one() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + all_ranks().get_rank()))


def shorter_on_one() -> nn.Module:
    layers = [nn.Linear(4, 4) for _ in range(2 - all_ranks().get_rank())]
    return nn.Sequential(*layers)


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "frozen": (frozen_on_one, r"1\.weight: .*, trained on ranks \[0\]; 1\.weight: .*, frozen on"),
    "wider": (wider_on_one, r"1\.weight: \(4, 4\) .* on ranks \[0\]; 1\.weight: \(5, 4\) .* on"),
    "shorter": (shorter_on_one, r"1\.weight: .* on ranks \[0\]; no parameter on ranks \[1\]"),
}


@pytest.mark.parametrize("how", CASES)
@on_ranks(2)
def test_the_first_parameter_that_differs_is_named(how: str) -> None:
    """One rank got an error about bytes, and the other returned a module."""
    make, message = CASES[how]
    plan = {"0": ColwiseParallel()}
    with pytest.raises(LockstepError, match=message):
        parallelize_module(make(), all_ranks(), plan)
    # the group works
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), all_ranks(), plan)
    assert model(torch.ones(2, 4)).shape[0] == 2


@on_ranks(2)
def test_nothing_is_sent_without_a_source() -> None:
    plan = {"0": ColwiseParallel()}
    model = nn.Sequential(nn.Linear(4, 4))
    with CommDebugMode() as mode:
        parallelize_module(model, all_ranks(), plan, src_data_rank=None)
    assert mode.get_total_counts() == 0
