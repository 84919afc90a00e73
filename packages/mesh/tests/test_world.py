"""Covers: world.py."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import (
    DeviceMesh,
    MeshError,
    all_gather,
    all_reduce,
    comm_over,
    init_device_mesh,
    restart_world,
)
from shoal_mesh._torch import timeout_of
from shoal_mesh.errors import MeshMismatchError, MeshTypeError, NoGroupError
from shoal_mesh.groups import world
from shoal_mesh.groups.process_groups import note_group
from shoal_mesh.groups.world import all_gather_objects, ensure_world
from shoal_mesh.testing import RankPool, on_ranks


@on_ranks(4)
def test_ranks_that_disagree_all_get_the_same_error() -> None:
    shape = (4, 1) if dist.get_rank() == 2 else (2, 2)
    with pytest.raises(MeshMismatchError, match="different arguments") as caught:
        init_device_mesh("cpu", shape)
    texts = all_gather_objects(ensure_world("cpu"), str(caught.value))
    assert len(set(texts)) == 1
    assert "ranks 0, 1, 3: cpu mesh of shape (2, 2)" in texts[0]
    assert "rank 2: cpu mesh of shape (4, 1)" in texts[0]
    names = ("a", "b") if dist.get_rank() else ("a", "c")
    with pytest.raises(MeshMismatchError, match="names"):
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)
    init_device_mesh("cpu", (4,), mesh_dim_names=(f"m{dist.get_rank()}",), validate=False)


@on_ranks(3)
def test_objects_of_any_size_are_gathered_and_small_ones_in_one_message() -> None:
    group = ensure_world("cpu")
    sent: list[int] = []
    gather = world._all_gather_bytes

    def counted(group: Any, data: bytes) -> list[bytes]:
        sent.append(len(data))
        return gather(group, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "_all_gather_bytes", counted)
        for longest in (0, 220, *range(226, 240), 300, 5000):
            sent.clear()
            texts = ["x" * (longest - 30 * rank) for rank in range(3)]
            assert all_gather_objects(group, texts[dist.get_rank()]) == texts
            rest = 8 + len(pickle.dumps(texts[0])) - 256
            assert sent == ([256, rest] if rest > 0 else [256])


@on_ranks(4)
def test_meshes_go_on_after_a_restart() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    turned = DeviceMesh("cpu", [[3, 0], [1, 2]])
    flat, comm, own = mesh.flatten("all"), comm_over((2, 0, 3, 1)), torch.tensor([dist.get_rank()])
    before = [
        all_gather(own, c).tolist()
        for c in (mesh.comm(0), mesh.comm("tp"), flat.comm(0), comm, turned.comm(0))
    ]
    held = [weakref.ref(group) for group in (*mesh.get_all_groups(), dist.group.WORLD)]
    note_group(mesh.comm("tp"))  # as compiled code does
    for _ in range(3):
        restart_world(timeout=50)
        for c, ranks in zip(
            (mesh.comm(0), mesh.comm("tp"), flat.comm(0), comm, turned.comm(0)), before, strict=True
        ):
            assert all_gather(own, c).tolist() == ranks
        assert mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert timeout_of(mesh.get_group("tp")) == 50
        gc.collect()
        assert all(ref() is None for ref in held), "a group of a destroyed world is still there"
        held = [weakref.ref(group) for group in (*mesh.get_all_groups(), dist.group.WORLD)]


@on_ranks(4)
def test_a_restart_with_fewer_ranks_has_new_meshes_only() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for wrong in ([0, 0], [4], [-1]):
        with pytest.raises(MeshError, match="distinct"):
            restart_world(wrong)
    with pytest.raises(MeshTypeError, match="sequence"):
        restart_world(3)  # type: ignore[arg-type]  # wrong on purpose
    if dist.get_rank() == 1:
        with pytest.raises(NoGroupError, match="not among"):
            restart_world([3, 0, 2])
        # the next test begins one with all ranks
        dist.destroy_process_group()
        return
    restart_world([3, 0, 2])
    with pytest.raises(NoGroupError, match="make new meshes"):
        mesh.get_group(0)
    assert all_gather(
        torch.tensor([mesh._coordinate]), (init_device_mesh("cpu", (3,)), 0)
    ).tolist() == [
        [1, 1],
        [0, 0],
        [1, 0],
    ]
    dist.destroy_process_group()


@on_ranks(2)
def test_a_group_with_options_of_its_own_is_not_made_again() -> None:
    # names that c10d gives to groups are free in a new store
    restart_world()
    slow = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    mesh = DeviceMesh.from_group(slow, "cpu")
    plain = DeviceMesh.from_group(dist.new_group([1, 0], use_local_synchronization=True), "cpu")
    restart_world()
    assert all_reduce(torch.ones(1), (plain, 0)).item() == 2
    with pytest.raises(NoGroupError, match="its own options"):
        all_reduce(torch.ones(1), (mesh, 0))


def _open_files_and_threads() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("kept", [False, True])
def test_a_cycle_leaves_no_descriptors_and_no_threads(kept: bool, tmp_path: Path) -> None:
    with RankPool(2) as pool:
        seen = pool.run(_cycles, kept, str(tmp_path))
    # a mesh that is kept has its groups until it is used under new ones
    for each in seen:
        assert all(last <= second for last, second in zip(each[-1], each[1], strict=True)), seen


def _cycles(kept: bool, folder: str) -> list[tuple[int, int]]:
    """Six times init, meshes, collectives, destroy.

    One mesh of the first cycle may be used in all.
    """
    rank, seen = dist.get_rank(), []
    held: list[DeviceMesh] = []
    dist.destroy_process_group()
    for i in range(6):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{i}", rank=rank, world_size=2)
        meshes = [init_device_mesh("cpu", (2, 1)), *held]
        for mesh in meshes:
            all_reduce(torch.ones(4), (mesh, 0))
            all_reduce(torch.ones(1 << 19), (mesh, (0, 1)), async_op=True).wait()
        if kept and not held:
            held = [init_device_mesh("cpu", (2, 1))]
        dist.destroy_process_group()
        del mesh, meshes
        seen.append(_open_files_and_threads())
    return seen


ENDS = """
import atexit, torch.distributed as dist
# runs after what is registered later
atexit.register(lambda: print("still there:", dist.is_initialized()))
from shoal_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1,))
print("while it runs:", dist.is_initialized())
"""


def test_a_group_that_a_mesh_began_ends_before_the_interpreter() -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env = {**os.environ, **ranks, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ENDS],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["while it runs: True", "still there: False"]


def restart(ranks: list[int] | None, timeout: float) -> int:
    if ranks is None or dist.get_rank() in ranks:
        restart_world(ranks, timeout=timeout)
    size = dist.get_world_size()
    dist.destroy_process_group()  # the next job begins one with all ranks
    return size


def test_ranks_with_other_restarts_behind_them_restart_together() -> None:
    pool = RankPool(3)
    try:
        assert pool.run(restart, [0, 2], 30.0) == [2, 3, 2]
        assert pool.run(restart, None, 5.0) == [3, 3, 3]
    finally:
        pool.close()
