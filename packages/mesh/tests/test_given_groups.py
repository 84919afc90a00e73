"""Covers: device_mesh.py: meshes over groups that a program gave, equal as values, each on its own groups."""

from __future__ import annotations

import gc
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal_mesh import DeviceMesh, abstract_mesh, all_reduce, init_device_mesh
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
