"""Covers: wrong arguments of public functions are typed errors, before anything changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_tp_styles import (
    ColwiseParallel,
    ParallelStyle,
    StyleError,
    UnmatchedPlanWarning,
    adapter_parameters,
    input_reshard,
    merge_adapters,
    parallelize_module,
    preview,
    unparallelize_module,
    verify,
)

MODULE = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
PLAN = {"0": ColwiseParallel()}
WRONG = (None, 3, 1.5, "x", [1], {"a": 1}, torch.ones(2), nn.Linear, ColwiseParallel())
CALLS: Mapping[str, Callable[[Any, Any], object]] = {
    "parallelize_module, module": lambda mesh, x: parallelize_module(x, mesh, PLAN),
    "parallelize_module, mesh": lambda mesh, x: parallelize_module(MODULE, x, PLAN),
    "parallelize_module, plan": lambda mesh, x: parallelize_module(MODULE, mesh, {"0": x}),
    "unparallelize_module": lambda mesh, x: unparallelize_module(x),
    "verify": lambda mesh, x: verify(x, PLAN, mesh),
    "preview": lambda mesh, x: preview(x, PLAN, mesh),
    "input_reshard": lambda mesh, x: input_reshard(x, mesh, 0),
    "merge_adapters": lambda mesh, x: merge_adapters(x),
    "adapter_parameters": lambda mesh, x: adapter_parameters(x),
}
ALLOWED = {"parallelize_module, plan": (str, ParallelStyle)}


@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments(call: str) -> None:
    before = copy.deepcopy(MODULE.state_dict())
    text = rf"{call.partition(',')[0]}: |plan entry '0': expected"
    for wrong in WRONG:
        if isinstance(wrong, ALLOWED.get(call, ())):
            continue
        with fake_world(2), pytest.raises(StyleError, match=text):
            CALLS[call](init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), wrong)
    assert all(torch.equal(value, before[name]) for name, value in MODULE.state_dict().items())
    assert type(MODULE) is nn.Sequential


def test_warnings_name_the_line_of_the_call() -> None:
    with fake_world(2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(MODULE, init_device_mesh("cpu", (2,)), {"none": ColwiseParallel()})
    assert [(each.category, each.filename) for each in caught] == [(UnmatchedPlanWarning, __file__)]
