"""Covers: create.py."""

from __future__ import annotations

import pickle

import pytest
import torch

from shoal_mesh import DeviceMesh, MeshError, abstract_mesh, init_device_mesh
from shoal_mesh.errors import NoGroupError
from shoal_mesh.groups.world import require_world
from shoal_mesh.testing import fake_world, on_ranks


def test_several_factorisations_of_the_same_ranks() -> None:
    flat = abstract_mesh((8,), ("world",), rank=5)
    dense, expert = (
        flat.unflatten(0, (4, 2), ("dp", "tp")),
        flat.unflatten(0, (2, 4), ("edp", "ep")),
    )
    assert dense.get_coordinate() == (2, 1)
    assert expert.get_coordinate() == (1, 1)
    assert dense["tp"].ranks == (4, 5)
    assert expert["ep"].ranks == (4, 5, 6, 7)
    assert dense.flatten("all") == expert.flatten("all")


def test_no_world_is_said_clearly() -> None:
    with pytest.raises(MeshError, match="torchrun"):
        init_device_mesh("cpu", (2,))
    mesh = pickle.loads(pickle.dumps(abstract_mesh((2,))))
    assert mesh.get_rank() == 0
    with fake_world(2):
        real = pickle.dumps(init_device_mesh("cpu", (2,)))
    lost = pickle.loads(real)
    assert lost.get_coordinate() is None
    with pytest.raises(NoGroupError, match="is unknown, because there is no default process group"):
        lost.get_rank()


@on_ranks(2)
def test_a_mesh_of_devices_that_the_machine_lacks_warns() -> None:
    if torch.xpu.is_available():
        pytest.skip("needs a machine without such devices")
    with pytest.warns(UserWarning, match="'xpu' devices on a machine without one"):
        init_device_mesh("xpu", (2,), lazy=True)
    with pytest.warns(UserWarning, match="'xpu' devices on a machine without one"):
        DeviceMesh.from_group(require_world(), "xpu")


def test_a_world_for_planning_may_have_any_devices() -> None:
    with fake_world(2):
        assert init_device_mesh("xpu", (2,)).device_type == "xpu"
