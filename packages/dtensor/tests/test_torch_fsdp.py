"""Covers: tensor/torch_fsdp.py."""

from __future__ import annotations

import pytest
import torch

from shoal_dtensor import DTensor, Shard
from shoal_dtensor.errors import ArgumentTypeError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


def test_a_parameter_refuses_when_torch_asks_for_its_hook() -> None:
    with fake_world(2):
        weight = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(ArgumentTypeError, match=r"got Spec\(f32\[4@\(0\)\].*shoal_data_parallel\.fully_shard"):
            hasattr(weight, "fsdp_pre_all_gather")
