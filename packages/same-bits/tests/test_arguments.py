"""Covers: wrong arguments of public functions are typed errors, before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_same_bits import (
    accumulate_in_tree,
    accumulate_stage_in_tree,
    check_arithmetic,
    compare_runs,
    invariant_arithmetic,
    record_run,
)
from shoal_tp_styles import ColwiseParallel, StyleError

MODULE = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
WRONG = (None, 3, 1.5, "x", [1], {"a": 1}, torch.ones(2), nn.Linear, ColwiseParallel())
CALLS: Mapping[str, Callable[[Any, Any], object]] = {
    "accumulate_in_tree, model": lambda mesh, x: accumulate_in_tree(x, [1]),
    "accumulate_in_tree, microbatches": lambda mesh, x: accumulate_in_tree(MODULE, x),
    "accumulate_stage_in_tree": lambda mesh, x: accumulate_stage_in_tree(x, 2),
    "check_arithmetic": lambda mesh, x: check_arithmetic(x),
    "compare_runs": lambda mesh, x: compare_runs(x, x),
    "invariant_arithmetic": lambda mesh, x: entered(invariant_arithmetic(x)),
    "record_run, model": lambda mesh, x: entered(record_run(x)),
    "record_run, batch": lambda mesh, x: entered(record_run(MODULE, x)),
}
ALLOWED = {"record_run, batch": type(None)}


def entered(block: AbstractContextManager[object]) -> None:
    with block:
        pass


@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments(call: str) -> None:
    before = copy.deepcopy(MODULE.state_dict())
    text = rf"{call.partition(',')[0]}: |inside invariant_arithmetic"
    for wrong in WRONG:
        if isinstance(wrong, ALLOWED.get(call, ())):
            continue
        with fake_world(2), pytest.raises(StyleError, match=text):
            CALLS[call](init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), wrong)
    assert all(torch.equal(value, before[name]) for name, value in MODULE.state_dict().items())
    assert type(MODULE) is nn.Sequential
