"""Log records of decisions and of plans.

Covers: dispatch/dispatch.py, redistribute/execution/execute.py.
"""

from __future__ import annotations

import logging

import pytest
import torch

from shoal_dtensor import Replicate, Shard, clear_cache, distribute_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


def test_decisions_and_plans_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with fake_world(2), caplog.at_level(logging.DEBUG, "shoal"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        clear_cache()
        a = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
        b = distribute_tensor(torch.ones(6, 4), mesh, [Shard(1)])
        _ = a + b, a + b
        a.redistribute(mesh, [Replicate()])
    (added,) = [
        record.getMessage() for record in caplog.records if "aten.add" in record.getMessage()
    ]
    assert added.startswith(
        "aten.add.Tensor(Spec(f32[6@(tp), 4] on (tp=2)), Spec(f32[6, 4@(tp)] on (tp=2))) -> Spec("
    )
    assert "argument 1: [S(1)] -> [S(0)]" in added
    plans = [record.getMessage() for record in caplog.records if record.name == "shoal.plans"]
    assert any(text.startswith("[S(0)] -> [R]") for text in plans)
