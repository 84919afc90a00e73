"""Covers: device_mesh.py, grid.py, arguments.py, create.py (without real ranks)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from shoal_mesh import (
    AxisError,
    BackendChoice,
    BackendError,
    DeviceMesh,
    MeshError,
    NoGroupError,
    abstract_mesh,
    current_mesh,
    init_device_mesh,
)
from shoal_mesh.testing import fake_world

NAMES = ("pp", "dp", "tp")


@pytest.fixture
def cube() -> DeviceMesh:
    return abstract_mesh((2, 3, 4), NAMES, rank=17)


def test_where_a_rank_is(cube: DeviceMesh) -> None:
    assert (cube.ndim, cube.shape, cube.size()) == (3, (2, 3, 4), 24)
    assert cube.size("dp") == cube.size(1) == 3
    assert cube.get_rank() == 17
    assert cube.get_coordinate() == (1, 1, 1)
    assert [cube.get_local_rank(name) for name in NAMES] == [1, 1, 1]
    assert cube._sym_get_coordinate(2) == 1
    assert cube.rank_at((1, 1, 1)) == 17
    assert cube.coordinate_of(99) is None
    assert cube.ranks_along("pp") == (5, 17)
    assert cube.ranks_along(("tp", "pp"), (0, 0, 0)) == (0, 12, 1, 13, 2, 14, 3, 15)
    assert torch.equal(cube.mesh, torch.arange(24, dtype=torch.int32).view(2, 3, 4))
    assert cube.mesh is cube.mesh
    assert cube.is_abstract


def test_axes_by_name_and_index(cube: DeviceMesh) -> None:
    assert [cube.axis_index(a) for a in ("pp", "tp", 0, -1)] == [0, 2, 0, 2]
    assert cube._get_mesh_dim_by_name("dp") == 1
    for wrong in ("zz", 3, -4):
        with pytest.raises(AxisError, match="no mesh axis") as caught:
            cube.axis_index(wrong)
        assert isinstance(caught.value, KeyError | IndexError)
        assert "pp, dp, tp" in str(caught.value)
    with pytest.raises(AxisError, match="say which"):
        cube.get_local_rank()
    with pytest.raises(AxisError, match="once"):
        cube["pp", "pp"]
    with pytest.raises(AxisError, match="no coordinate"):
        cube.rank_at((2, 0, 0))


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


def test_several_factorisations_of_the_same_ranks() -> None:
    flat = abstract_mesh((8,), ("world",), rank=5)
    dense, expert = flat.unflatten(0, (4, 2), ("dp", "tp")), flat.unflatten(0, (2, 4), ("edp", "ep"))
    assert dense.get_coordinate() == (2, 1)
    assert expert.get_coordinate() == (1, 1)
    assert dense["tp"].ranks == (4, 5)
    assert expert["ep"].ranks == (4, 5, 6, 7)
    assert dense.flatten("all") == expert.flatten("all")


def test_a_rank_outside() -> None:
    mesh = abstract_mesh((2, 2), ("a", "b"), rank=9)
    assert mesh.get_coordinate() is None
    assert not mesh._is_current_rank_part_of_mesh()
    assert mesh["b"].get_coordinate() is None
    assert DeviceMesh.concatenate([mesh["b"], mesh["a"]]).ranks == (0, 2, 1, 3)
    with pytest.raises(NoGroupError, match="not in"):
        mesh.get_local_rank("a")
    with pytest.raises(NoGroupError, match="not in"):
        mesh.ranks_along("a")


def test_as_a_value(cube: DeviceMesh) -> None:
    same = abstract_mesh((2, 3, 4), NAMES, rank=17)
    assert same == cube
    assert hash(same) == hash(cube)
    assert same._stable_hash() == cube._stable_hash()
    for other in (
        abstract_mesh((2, 3, 4), NAMES, rank=16),
        abstract_mesh((2, 3, 4), rank=17),
        abstract_mesh((2, 12), ("pp", "dp"), rank=17),
        abstract_mesh((2, 3, 4), NAMES, rank=17, device_type="cuda"),
        "mesh",
    ):
        assert cube != other
    assert copy.deepcopy(cube) is cube
    assert copy.copy(cube) is cube
    for mesh in (cube, cube["tp"], cube["tp", "pp"].flatten("f"), cube.get_all_submeshes("tp")[0]):
        assert pickle.loads(pickle.dumps(mesh)) == mesh


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (abstract_mesh((2, 4), ("dp", "tp")), "DeviceMesh((dp=2, tp=4), 'cpu', ranks 0-7, abstract)"),
        (abstract_mesh((2, 4), ("dp", "tp"), rank=5)["dp"], "DeviceMesh((dp=2), 'cpu', ranks 1, 5, abstract)"),
        (abstract_mesh((1,)), "DeviceMesh((1,), 'cpu', rank 0, abstract)"),
        (abstract_mesh((10, 10))[1, 0][0], "DeviceMesh((10,), 'cpu', ranks 0-9, abstract)"),
        (abstract_mesh((40, 10)), "DeviceMesh((40, 10), 'cpu', Layout(40:10 x 10:1 @ 0), abstract)"),
        (abstract_mesh((3, 4))[1, 0], "DeviceMesh((4, 3), 'cpu', ranks 0, 4, 8, 1, 5, 9, 2, 6, ..., abstract)"),
    ],
)
def test_repr(mesh: DeviceMesh, text: str) -> None:
    assert repr(mesh) == text


def test_with_mesh(cube: DeviceMesh) -> None:
    assert current_mesh() is None
    with cube as entered:
        assert entered is cube
        with cube["tp"]:
            assert current_mesh() == cube["tp"]
        assert current_mesh() is cube
    assert current_mesh() is None


def test_an_abstract_mesh_sends_nothing(cube: DeviceMesh) -> None:
    with pytest.raises(NoGroupError, match="abstract"):
        cube.comm("tp")
    with pytest.raises(NoGroupError, match="abstract"):
        cube.get_group("tp")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: init_device_mesh("cuda:0", (2,)), MeshError, "has an index"),
        (lambda: init_device_mesh("horse", (2,)), MeshError, "no device type"),
        (lambda: init_device_mesh("cpu", (2, 0)), MeshError, "one positive size"),
        (lambda: init_device_mesh("cpu", (8,)), MeshError, "needs 8 ranks; the world has 4"),
        (lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("a", "b")), AxisError, "needs 1 names"),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "a")), AxisError, "distinct"),
        (lambda: init_device_mesh("cpu", (4,), backend_override={"x": "gloo"}), AxisError, "names axis 'x'"),
        (lambda: init_device_mesh("cpu", (4,), backend_override={2: "gloo"}), AxisError, "names axis 2"),
        (
            lambda: init_device_mesh(
                "cpu", (4,), mesh_dim_names=("a",), backend_override=dict[Any, str]([("a", "fake"), (0, "fake")])
            ),
            AxisError,
            "twice",
        ),
        (lambda: init_device_mesh("cpu", (4,), backend_override={0: ()}), BackendError, "give a backend"),
        (lambda: init_device_mesh("cpu", (2, 2), backend_override={0: "pigeon"}), BackendError, "pigeon"),
        (lambda: DeviceMesh("cpu", [0, 0]), MeshError, r"\[0\] are there more often"),
        (lambda: DeviceMesh("cpu", [0, 7]), MeshError, r"ranks \[7\] are not in the world of 4"),
        (lambda: DeviceMesh("cpu", [-1, 0]), MeshError, r"ranks \[-1\]"),
        (lambda: DeviceMesh("cpu", [0.5]), MeshError, "integers"),
        (lambda: DeviceMesh("cpu", []), MeshError, "at least one|integers"),
        (lambda: DeviceMesh("cpu", torch.empty(0, dtype=torch.int)), MeshError, "at least one rank"),
        (lambda: abstract_mesh((2,), rank=-1), MeshError, "rank -1"),
    ],
)
def test_bad_arguments_are_typed_errors(call: Any, error: type[Exception], text: str) -> None:
    with fake_world(4), pytest.raises(error, match=text):
        call()


def test_meshes_of_given_ranks() -> None:
    with fake_world(8, rank=6):
        regular = DeviceMesh("cpu", [[0, 4], [2, 6]], mesh_dim_names=("a", "b"))
        assert regular._rank_map is None  # strides say it
        assert regular.get_coordinate() == (1, 1)
        odd = DeviceMesh("cpu", [[0, 5], [6, 1], [7, 2]], mesh_dim_names=("a", "b"))
        assert odd.get_coordinate() == (1, 0)
        assert odd["b"].ranks == (6, 1)
        assert odd["a"].ranks == (0, 6, 7)
        assert odd.flatten("f").ranks == (0, 5, 6, 1, 7, 2)
        assert odd["b"] == DeviceMesh("cpu", [6, 1], mesh_dim_names=("b",))
        assert odd.coordinate_of(3) is None
        assert pickle.loads(pickle.dumps(odd)) == odd
        assert DeviceMesh("cpu").shape == (8,)
        assert DeviceMesh("cpu", torch.tensor(3)).shape == (1,)
        assert init_device_mesh("cpu", (2,)).get_coordinate() is None
        abstract = DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False, _rank=3)
        assert abstract.is_abstract
        assert abstract.get_coordinate() == (1, 1)


def test_no_world_is_said_clearly() -> None:
    with pytest.raises(MeshError, match="torchrun"):
        init_device_mesh("cpu", (2,))
    mesh = pickle.loads(pickle.dumps(abstract_mesh((2,))))
    assert mesh.get_rank() == 0
    with fake_world(2):
        real = pickle.dumps(init_device_mesh("cpu", (2,)))
    lost = pickle.loads(real)
    assert lost.get_coordinate() is None
    with pytest.raises(NoGroupError, match="does not know its rank"):
        lost.get_rank()


def test_backend_choices_are_part_of_the_value() -> None:
    with fake_world(4):
        plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        chosen = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"b": "fake"})
        assert plain != chosen
        assert chosen["b"]._choices == (BackendChoice("fake"),)
        assert plain["a"] == chosen["a"]
        assert chosen.flatten("f")._choices == (BackendChoice(),)
        assert chosen.unflatten("b", (2, 1), ("c", "d"))._choices[1:] == (BackendChoice("fake"),) * 2
        assert chosen["b"].flatten("g", backend_override="fake")._choices == (BackendChoice("fake"),)


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
