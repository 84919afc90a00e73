"""Covers: create.py: torch's `_mesh_resources`."""

from __future__ import annotations

import pytest
import torch

from shoal_mesh import abstract_mesh
from shoal_mesh.errors import NoGroupError
from shoal_mesh.testing import fake_world


def test_mesh_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal_mesh import _mesh_resources

    mesh = abstract_mesh((2, 2), ("a", "b"))
    with pytest.raises(NoGroupError, match="no device mesh is current"):
        _mesh_resources.get_current_mesh()
    with mesh:
        assert _mesh_resources.get_current_mesh() is mesh
    assert _mesh_resources.get_root_mesh(mesh["a"]) is mesh
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with fake_world(8):
        assert _mesh_resources.num_hosts("cpu") == 4
    assert _mesh_resources.num_devices_per_host("cuda") == torch.cuda.device_count()
