"""Covers: wrong arguments of public functions are typed errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_models import auto_plan, format_plan, load_sharded, propose, save_sharded
from shoal_tp_styles import ColwiseParallel, StyleError

WRONG = (None, 3, 1.5, "x", [1], {"a": 1}, torch.ones(2), nn.Linear, ColwiseParallel())
CALLS: Mapping[str, Callable[[Any, Any], object]] = {
    "auto_plan": lambda mesh, x: auto_plan(x, mesh),
    "propose": lambda mesh, x: propose(x, 2, 1000),
    "load_sharded": lambda mesh, x: load_sharded(x, {}),
    "save_sharded": lambda mesh, x: save_sharded(x, Path("nowhere")),
    "format_plan": lambda mesh, x: format_plan(x),
}
ALLOWED = {"format_plan": dict}  # of anything: it prints what is there


@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments(call: str) -> None:
    for wrong in WRONG:
        if isinstance(wrong, ALLOWED.get(call, ())):
            continue
        with fake_world(2), pytest.raises(StyleError, match=call):
            CALLS[call](init_device_mesh("cpu", (2,)), wrong)
