"""Meshes over groups that a program gave, equal as values, each on its own groups.

Covers: device_mesh.py.
"""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import (
    DeviceMesh,
    abstract_mesh,
    all_gather,
    all_reduce,
    init_device_mesh,
    restart_world,
)
from shoal_mesh.errors import MeshError, MeshTypeError, NoGroupError, PeerError
from shoal_mesh.testing import on_ranks


@on_ranks(2)
def test_equal_meshes_over_two_groups_have_two_identities() -> None:
    groups = [dist.new_group([0, 1]) for _ in "ab"]
    a, b = (DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)) for group in groups)
    assert a == b and hash(a) == hash(b) and a.identity is not b.identity
    assert [a.get_group(), b.get_group()] == groups
    again = DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=("dp",))
    assert again.identity is a.identity
    assert DeviceMesh.from_group(groups[0], "cpu").identity is not a.identity  # other names


@on_ranks(2)
def test_groups_that_every_mesh_gets_make_no_other_identity() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for group in (dist.group.WORLD, mesh.get_group()):
        assert group is not None
        given = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        assert given == mesh and given.identity is mesh.identity
    assert abstract_mesh((2,)).identity is abstract_mesh((2,)).identity is not mesh.identity


@on_ranks(4)
def test_slices_and_flattened_axes_use_the_groups_that_were_given() -> None:
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = [columns[rank % 2], rows[rank // 2]]
    grid = [[0, 1], [2, 3]]
    mesh = DeviceMesh.from_group(own, "cpu", grid, mesh_dim_names=("dp", "tp"))
    plain = DeviceMesh("cpu", grid, mesh_dim_names=("dp", "tp"))
    assert mesh["tp"].get_group() is own[1] and mesh["dp"].get_group() is own[0]
    assert mesh["tp"] == plain["tp"] and mesh["tp"].identity is not plain["tp"].identity
    # once a new group was made for another name of the same axis
    assert mesh["tp"].flatten("experts").get_group() is own[1]
    assert mesh["tp", "dp"].get_group("dp") is own[0]
    assert all_reduce(torch.ones(()), (mesh["tp"], 0)).item() == 2


@on_ranks(2)
def test_a_mesh_keeps_its_group_with_its_options() -> None:
    slow = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    other = init_device_mesh("cpu", (2,))
    mesh = DeviceMesh.from_group(slow, "cpu")
    assert mesh == other and mesh.get_group() is slow and other.get_group() is not slow


@on_ranks(2)
def test_identities_go_with_their_meshes() -> None:
    from shoal_mesh.mesh.rank_grid import MeshIdentity

    gc.collect()
    before = len(MeshIdentity._by_key)
    meshes = [DeviceMesh.from_group(dist.new_group([0, 1]), "cpu") for _ in range(3)]
    assert len(MeshIdentity._by_key) == before + 3
    del meshes
    gc.collect()
    assert len(MeshIdentity._by_key) == before


# --- groups in the order of a mesh ----------------------------------------------------------------


@on_ranks(4)
def test_groups_may_keep_the_order_of_a_mesh() -> None:
    """As in torch 2.15: by default the ranks of a group count by number."""
    ranks = [2, 0, 3, 1]
    own_rank = dist.get_rank()
    sorted_mesh = DeviceMesh("cpu", ranks)
    mesh = DeviceMesh("cpu", ranks, preserve_rank_order=True)
    assert sorted_mesh.get_group() is dist.group.WORLD
    group = mesh.get_group()
    assert dist.get_process_group_ranks(group) == ranks
    assert group.rank() == mesh.get_local_rank() == ranks.index(own_rank)
    gathered = [torch.empty(()) for _ in ranks]
    dist.all_gather(gathered, torch.tensor(float(own_rank)), group=group)
    assert [tensor.item() for tensor in gathered] == ranks
    ours = all_gather(torch.tensor([float(own_rank)]), (mesh, 0))
    assert ours.tolist() == ranks
    assert mesh != sorted_mesh
    again = DeviceMesh("cpu", ranks, preserve_rank_order=True)
    assert again == mesh and again.get_group() is group
    # a group of ascending ranks is the ordinary one
    in_order = DeviceMesh("cpu", [0, 1, 2, 3], preserve_rank_order=True)
    assert in_order.get_group() is dist.group.WORLD


@on_ranks(4)
def test_derived_meshes_keep_the_order_of_ranks() -> None:
    grid = DeviceMesh(
        "cpu", [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"), preserve_rank_order=True
    )
    plain = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"))

    def ranks_of(group: dist.ProcessGroup) -> list[int]:
        return dist.get_process_group_ranks(group)

    own_row = [3, 1] if dist.get_rank() % 2 else [2, 0]
    assert ranks_of(grid["tp"].get_group()) == own_row
    assert ranks_of(plain["tp"].get_group()) == sorted(own_row)
    assert ranks_of(grid.flatten().get_group()) == [3, 1, 2, 0]
    assert ranks_of(grid.get_group(("tp", "dp"))) == [3, 2, 1, 0]
    flat = grid.flatten("flat", backend_override="gloo")
    assert ranks_of(flat.get_group()) == [3, 1, 2, 0]
    halves = flat.unflatten(0, (2, 2), ("a", "b"), backend_override={"b": "gloo"})
    assert ranks_of(halves.get_group("b")) == own_row


def test_the_order_of_ranks_is_a_bool() -> None:
    with pytest.raises(MeshTypeError, match="preserve_rank_order"):
        wrong: Any = "yes"
        DeviceMesh("cpu", [0], preserve_rank_order=wrong, _init_backend=False, _rank=0)


# --- the end of groups ----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
@on_ranks(4, timeout=60)
def test_ranks_do_not_wait_for_a_rank_that_has_aborted_its_mesh(transport: str) -> None:
    """Their error would come with the timeout of the group otherwise."""
    os.environ["SHOAL_SHARED_MEMORY"] = str(int(transport == "shared memory"))
    restart_world()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = init_device_mesh("cpu", (4,))
    all_reduce(torch.ones(2), (mesh, "tp"))
    # an abort would end the collective above on a rank that is still in it
    dist.barrier()
    if mesh.get_local_rank("tp") == 1:
        with pytest.raises(PeerError):
            all_reduce(torch.ones(2), (mesh, "tp"))
    mesh.abort()
    # again changes nothing
    mesh.abort()
    for use in (
        lambda: all_reduce(torch.ones(2), (mesh, "tp")),
        lambda: mesh.get_group("dp"),
        # a group that was not made before
        lambda: mesh.comm(("tp", "dp")),
        lambda: mesh["tp"].get_group(),
    ):
        with pytest.raises(NoGroupError, match="aborted"):
            use()
    # other groups go on, and so do new meshes
    assert all_reduce(torch.ones(()), (whole, 0)).item() == 4
    new = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    assert all_reduce(torch.ones(()), (new, "y")).item() == 2
    restart_world()
    assert all_reduce(torch.ones(()), (mesh, "tp")).item() == 2
    del os.environ["SHOAL_SHARED_MEMORY"]


@on_ranks(2)
def test_the_default_group_ends_with_a_mesh_of_all_ranks() -> None:
    mesh = init_device_mesh("cpu", (2,))
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    mesh.abort()
    assert not dist.is_initialized()
    with pytest.raises(NoGroupError):
        all_reduce(torch.ones(()), (mesh, 0))
    store = dist.PrefixStore("again", store)  # type: ignore[attr-defined]  # not in the stubs
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert all_reduce(torch.ones(()), (mesh, 0)).item() == 2


@on_ranks(2)
def test_a_derived_mesh_is_not_aborted() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(MeshError, match=r"was derived from .*: abort that mesh"):
        mesh["tp"].abort()
    assert all_reduce(torch.ones(()), (mesh, "tp")).item() == 2
    # without groups there is nothing to abort
    abstract_mesh((2,)).abort()
