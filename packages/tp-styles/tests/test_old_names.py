"""Old names of attributes that others replaced.  Covers: logits.py, module_sharding.py."""

from __future__ import annotations

import pytest
from torch import nn

from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_tp_styles import ColwiseParallel, ModuleCall, Vocab


def test_old_names_give_the_same() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        vocab = Vocab.even(mesh, 5)
        with pytest.deprecated_call(match="Vocab.own is now Vocab.own_classes"):
            assert vocab.own == vocab.own_classes == 3
    linear = nn.Linear(2, 2)
    sharding = ColwiseParallel().sharding(linear)
    call = ModuleCall(linear, sharding, (), {}, (), ranks=2)
    with pytest.deprecated_call(match="ModuleCall.trained is now ModuleCall.trained_parameters"):
        old_method = call.trained
    assert old_method("bias", "absent") == call.trained_parameters("bias") == [linear.bias]
