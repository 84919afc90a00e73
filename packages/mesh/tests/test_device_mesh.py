"""Covers: device_mesh.py, without real ranks; against torch's own under `parity`."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

import shoal_mesh
from shoal_mesh import DeviceMesh, MeshError, abstract_mesh, current_mesh, init_device_mesh
from shoal_mesh.errors import AxisError
from shoal_mesh.groups.world import all_gather_objects, ensure_world
from shoal_mesh.testing import fake_world, on_ranks

NAMES = ("pp", "dp", "tp")


@pytest.fixture
def cube() -> DeviceMesh:
    return abstract_mesh((2, 3, 4), NAMES, rank=17)


def test_slices_in_any_order_and_by_index(cube: DeviceMesh) -> None:
    assert cube["tp"].ranks == (16, 17, 18, 19)
    assert cube["tp"] is cube["tp"]
    assert cube["tp", "pp"].ranks == (4, 16, 5, 17, 6, 18, 7, 19)
    assert cube["pp", "tp"] == cube["tp", "pp"]["pp", "tp"]
    assert cube[2].mesh_dim_names == ("tp",)
    assert cube[0, 2] == cube["pp", "tp"]
    assert cube["pp", "dp", "tp"] is cube
    assert cube["tp"].get_coordinate() == (1,)
    assert cube["tp"]._get_root_mesh() is cube
    assert cube["tp"]._get_root_mesh_dim() == 2
    assert cube._get_root_mesh_dim() is None
    assert cube["pp", "tp"]._get_root_mesh_dim() is None
    unnamed = abstract_mesh((2, 3))
    assert unnamed.axis_names == ("0", "1")
    assert unnamed[1].mesh_dim_names is None
    assert unnamed["1"].ranks == (0, 1, 2)


def test_flatten(cube: DeviceMesh) -> None:
    flat = cube["pp", "tp"].flatten()
    assert flat.mesh_dim_names == ("pp_tp",)
    assert flat.ranks == (4, 5, 6, 7, 16, 17, 18, 19)
    assert cube["pp_tp"] == flat
    assert cube["pp_tp", "dp"].shape == (8, 3)
    assert cube["pp", "tp"].flatten() is flat
    assert cube._flatten("all").size() == 24
    assert dict(cube._flatten_mapping) == {"pp_tp": flat, "all": cube["all"]}
    assert cube["tp"].flatten() is cube["tp"]
    with pytest.raises(AxisError, match="has an axis of that name"):
        cube["pp", "tp"].flatten("dp")
    with pytest.raises(AxisError, match="already the name"):
        cube["dp", "tp"].flatten("pp_tp")
    with pytest.raises(AxisError, match="no mesh axis"):
        cube["nothing"]


def test_unflatten(cube: DeviceMesh) -> None:
    split = cube.unflatten("tp", (2, 2), ("a", "b"))
    assert split.mesh_dim_names == ("pp", "dp", "a", "b")
    assert split.get_coordinate() == (1, 1, 0, 1)
    assert split.ranks == cube.ranks
    assert split["a"].ranks == (17, 19)
    assert abstract_mesh((4,))._unflatten(0, (2, 2)).shape == (2, 2)
    # no strides say this one: it falls back to a list of ranks
    odd = cube["tp", "dp"].flatten("x").unflatten("x", (3, 4), ("u", "v"))
    assert odd.ranks == cube["tp", "dp"].ranks
    assert odd["u"].size() == 3
    with pytest.raises(MeshError, match="one name per size"):
        cube.unflatten("tp", (2, 2))
    with pytest.raises(MeshError, match="has 4 ranks"):
        cube.unflatten("tp", (3, 2), ("a", "b"))
    with pytest.raises(AxisError, match="distinct"):
        cube.unflatten("tp", (2, 2), ("a", "dp"))


def test_a_fact_of_a_mesh_cannot_be_deleted(cube: DeviceMesh) -> None:
    with pytest.raises(AttributeError, match="cannot delete 'shape'"):
        del cube.shape
    assert cube.ndim == 3


def test_concatenate(cube: DeviceMesh) -> None:
    joined = DeviceMesh.concatenate([cube["tp"], cube["pp"]])
    assert joined == cube["tp", "pp"]
    assert DeviceMesh._concatenate([cube["pp"], cube["dp", "tp"]]) == cube
    with pytest.raises(MeshError, match="same ranks"):
        DeviceMesh.concatenate([cube["tp"], cube["tp"]])
    with pytest.raises(MeshError, match="sliced from one mesh"):
        DeviceMesh.concatenate([cube["tp"], abstract_mesh((2, 2), ("x", "y"))["x"]])
    with pytest.raises(MeshError, match="at least one"):
        DeviceMesh.concatenate([])


def test_concatenate_slices_elsewhere(cube: DeviceMesh) -> None:
    # this rank is 17, at (1, 1, 1)
    rows, columns = cube.get_all_submeshes("tp"), cube.get_all_submeshes("pp")
    assert DeviceMesh.concatenate([rows[0]]).ranks == (0, 1, 2, 3)
    assert DeviceMesh.concatenate([rows[0], columns[2]]).ranks == (0, 12, 1, 13, 2, 14, 3, 15)
    with pytest.raises(MeshError, match="do not have ranks in common"):
        DeviceMesh.concatenate([rows[0], cube["pp"]])


def test_a_slice_of_another_mesh_that_equals_one_of_this_is_one_of_this() -> None:
    ours, theirs = (
        abstract_mesh((2, 3), ("data", "tensor")),
        abstract_mesh((2, 3), ("batch", "tensor")),
    )
    assert ours["tensor"] == theirs["tensor"]
    assert DeviceMesh.concatenate([ours["data"], theirs["tensor"]]) == ours
    other = abstract_mesh((3, 2), ("tensor", "data"))["tensor"]
    with pytest.raises(MeshError, match="sliced from one mesh"):
        DeviceMesh.concatenate([ours["data"], other])


def test_a_slice_that_equals_one_of_a_flattened_or_unflattened_mesh_is_one_of_it() -> None:
    ours, theirs = (abstract_mesh((2, 4, 1), (name, "data", "tensor")) for name in "ab")
    parts, their_parts = (
        mesh.unflatten("data", (2, 2), ("outer", "inner")) for mesh in (ours, theirs)
    )
    assert DeviceMesh.concatenate([parts["outer"], their_parts["inner"]]) == parts["outer", "inner"]
    merged, their_merged = (mesh["data", "tensor"].flatten("both") for mesh in (ours, theirs))
    assert DeviceMesh.concatenate([ours["a"], their_merged]) == ours["a", "both"]
    other = abstract_mesh((4, 2), ("outer", "inner"))["outer"]
    with pytest.raises(MeshError, match="sliced from one mesh"):
        DeviceMesh.concatenate([merged, other])


def test_all_submeshes(cube: DeviceMesh) -> None:
    every = cube.get_all_submeshes("tp")
    assert [m.ranks for m in every] == [tuple(range(4 * i, 4 * i + 4)) for i in range(6)]
    assert sum(m is cube["tp"] for m in every) == 1
    assert [m.get_coordinate() for m in every].count(None) == 5
    assert len(cube._get_all_submeshes("pp")) == 12
    flat = [m.flatten() for m in cube.get_all_submeshes(("dp", "tp"))]
    assert [m.ranks for m in flat] == [tuple(range(12)), tuple(range(12, 24))]
    assert cube["dp_tp"] == flat[1]
    assert cube[["tp", "pp"]] is cube["tp", "pp"]


def test_with_mesh(cube: DeviceMesh) -> None:
    assert current_mesh() is None
    with cube as entered:
        assert entered is cube
        with cube["tp"]:
            assert current_mesh() == cube["tp"]
        assert current_mesh() is cube
    assert current_mesh() is None


@on_ranks(4)
def test_pickles_find_the_groups_and_slices_follow_the_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    back = pickle.loads(pickle.dumps(mesh))
    assert back == mesh
    assert back.get_group("tp") is mesh.get_group("tp")
    sent = all_gather_objects(ensure_world("cpu"), pickle.dumps(mesh["tp"]))[0]
    assert pickle.loads(sent) == mesh["tp"]


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
@settings(max_examples=25)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.data())
def test_slices_flattened_and_split_axes_agree(sizes: list[int], data: st.DataObject) -> None:
    from torch.distributed.device_mesh import DeviceMesh as Theirs, init_device_mesh as their_init

    names = tuple("abcd"[: len(sizes)])
    total = int(torch.tensor(sizes).prod())
    rank = data.draw(st.integers(0, total - 1))
    kept = tuple(sorted(data.draw(st.sets(st.sampled_from(names), min_size=1))))
    with fake_world(total, rank):
        ours = shoal_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)
        theirs = their_init("cpu", tuple(sizes), mesh_dim_names=names)
        _agree(ours, theirs)
        try:
            sliced = theirs[kept]
        except NotImplementedError:
            # torch 2.11 refuses some slices of axes of size 1: nothing to compare with
            assume(False)
        _agree(ours[kept], sliced)
        if len(kept) > 1:
            _agree(ours[kept]._flatten("flat"), theirs[kept]._flatten("flat"))
            _agree(ours["flat"], theirs["flat"])
        axis = data.draw(st.sampled_from(names))
        split = (1, ours.size(axis))
        _agree(
            ours._unflatten(axis, split, ("x", "y")),
            theirs._unflatten(names.index(axis), split, ("x", "y")),
        )
        for a, b in zip(
            ours._get_all_submeshes(axis), theirs._get_all_submeshes(axis), strict=True
        ):
            assert torch.equal(a.mesh, b.mesh)
        joined = [ours[name] for name in names], [theirs[name] for name in names]
        _agree(shoal_mesh.DeviceMesh._concatenate(joined[0]), Theirs._concatenate(joined[1]))


def _agree(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours.mesh, theirs.mesh)
    assert ours.mesh.dtype == theirs.mesh.dtype
    assert (ours.ndim, ours.shape, ours.size()) == (theirs.ndim, theirs.shape, theirs.size())
    assert ours.mesh_dim_names == theirs.mesh_dim_names
    assert ours.get_rank() == theirs.get_rank()
    assert ours.get_coordinate() == tuple(theirs.get_coordinate())
    for axis in range(ours.ndim):
        assert ours.get_local_rank(axis) == theirs.get_local_rank(axis)
        mine, other = (
            torch.distributed.get_process_group_ranks(m.get_group(axis)) for m in (ours, theirs)
        )
        assert mine == other


@pytest.mark.parity
def test_every_public_name_is_here() -> None:
    import torch.distributed.device_mesh as theirs

    for name in theirs.__all__:
        assert hasattr(shoal_mesh, name)
    public = {name for name in dir(theirs.DeviceMesh) if not name.startswith("_")}
    assert public <= set(dir(shoal_mesh.DeviceMesh))
