"""Covers: events.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import (
    CommDebugMode,
    DeviceMesh,
    all_reduce,
    init_device_mesh,
)
from shoal_mesh.testing import fake_world


@pytest.fixture
def mesh() -> Any:
    with fake_world(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_leaving_leaves_nothing_behind(mesh: DeviceMesh) -> None:
    from shoal_mesh.events import observers

    with CommDebugMode() as outer:
        with CommDebugMode() as inner:
            all_reduce(torch.ones(2), (mesh, "tp"))
        dist.all_reduce(torch.ones(2))
    assert (outer.get_total_counts(), inner.get_total_counts()) == (2, 1)
    with pytest.raises(RuntimeError, match="inside"), CommDebugMode():
        raise RuntimeError("inside")
    assert observers == []
    with outer:
        pass
    assert outer.comm_counts == {}
