"""Covers: rank_grid.py."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from shoal_mesh import DeviceMesh, abstract_mesh
from shoal_mesh.errors import AxisError, NoGroupError

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
    with pytest.raises(AxisError, match="name one of them"):
        cube.get_local_rank()
    with pytest.raises(AxisError, match="once"):
        cube["pp", "pp"]
    with pytest.raises(AxisError, match="no coordinate"):
        cube.rank_at((2, 0, 0))


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
        (
            abstract_mesh((2, 4), ("dp", "tp")),
            "DeviceMesh((dp=2, tp=4), 'cpu', ranks 0-7, abstract)",
        ),
        (
            abstract_mesh((2, 4), ("dp", "tp"), rank=5)["dp"],
            "DeviceMesh((dp=2), 'cpu', ranks 1, 5, abstract)",
        ),
        (abstract_mesh((1,)), "DeviceMesh((1,), 'cpu', rank 0, abstract)"),
        (abstract_mesh((10, 10))[1, 0][0], "DeviceMesh((10,), 'cpu', ranks 0-9, abstract)"),
        (abstract_mesh((40, 10)), "DeviceMesh((40, 10), 'cpu', ranks 0-399, abstract)"),
        (
            abstract_mesh((3, 4))[1, 0],
            "DeviceMesh((4, 3), 'cpu', ranks 0, 4, 8, 1, 5, 9, 2, 6, ..., abstract)",
        ),
    ],
)
def test_repr(mesh: DeviceMesh, text: str) -> None:
    assert repr(mesh) == text


def test_a_notebook_shows_the_ranks_as_a_table() -> None:
    html = abstract_mesh((2, 3), ("data", "tensor"))._repr_html_()
    assert "<tr><th>data</th><th>tensor 0</th><th>tensor 1</th><th>tensor 2</th></tr>" in html
    assert "<tr><td>1</td><td>3</td><td>4</td><td>5</td></tr>" in html
    assert abstract_mesh((40, 10))._repr_html_().startswith("<pre>DeviceMesh((40, 10)")


def test_names_of_axes_are_escaped_in_a_notebook() -> None:
    html = abstract_mesh((2, 2), ("<i>", "<b>"))._repr_html_()
    assert "<i>" not in html and "<b>" not in html and "<th>&lt;b&gt; 1</th>" in html
