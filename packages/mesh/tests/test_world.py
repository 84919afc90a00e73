"""Covers: world.py."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist

from shoal_mesh import (
    DeviceMesh,
    MeshMismatchError,
    init_device_mesh,
)
from shoal_mesh.testing import on_ranks


@on_ranks(4)
def test_ranks_that_disagree_all_get_the_same_error() -> None:
    shape = (4, 1) if dist.get_rank() == 2 else (2, 2)
    with pytest.raises(MeshMismatchError, match="different arguments") as caught:
        init_device_mesh("cpu", shape)
    texts: list[Any] = [None] * 4
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    assert "ranks 0-1, 3: cpu mesh of shape (2, 2)" in texts[0]
    assert "rank 2: cpu mesh of shape (4, 1)" in texts[0]
    names = ("a", "b") if dist.get_rank() else ("a", "c")
    with pytest.raises(MeshMismatchError, match="names"):
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)
    init_device_mesh("cpu", (4,), mesh_dim_names=(f"m{dist.get_rank()}",), validate=False)


ENDS = """
import atexit, torch.distributed as dist
atexit.register(lambda: print("still there:", dist.is_initialized()))  # runs after what is registered later
from shoal_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1,))
print("while it runs:", dist.is_initialized())
"""


def test_a_group_that_a_mesh_began_ends_before_the_interpreter() -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env = {**os.environ, **ranks, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", ENDS], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["while it runs: True", "still there: False"]
