"""Covers: rank_layout.py: arguments of users."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from shoal_mesh import DeviceMesh, MeshError, abstract_mesh, init_device_mesh
from shoal_mesh.errors import AxisError, BackendError
from shoal_mesh.groups.process_groups import BackendChoice
from shoal_mesh.testing import fake_world

BOTH_FORMS_OF_ONE_AXIS = dict[Any, str]([("a", "fake"), (0, "fake")])


# id -> the function and its arguments, the error and its text; the world has four ranks
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "device index": (partial(init_device_mesh, "cuda:0", (2,)), MeshError, "has an index"),
    "no device": (partial(init_device_mesh, "horse", (2,)), MeshError, "not a device type"),
    "size 0": (partial(init_device_mesh, "cpu", (2, 0)), MeshError, "one positive size"),
    "too many ranks": (
        partial(init_device_mesh, "cpu", (8,)),
        MeshError,
        "needs 8 ranks; the world has 4",
    ),
    "too many names": (
        partial(init_device_mesh, "cpu", (4,), mesh_dim_names=("a", "b")),
        AxisError,
        "needs 1 names",
    ),
    "one name twice": (
        partial(init_device_mesh, "cpu", (2, 2), mesh_dim_names=("a", "a")),
        AxisError,
        "distinct",
    ),
    "backend of an unknown name": (
        partial(init_device_mesh, "cpu", (4,), backend_override={"x": "gloo"}),
        AxisError,
        "names axis 'x'",
    ),
    "backend of an unknown number": (
        partial(init_device_mesh, "cpu", (4,), backend_override={2: "gloo"}),
        AxisError,
        "names axis 2",
    ),
    "two backends of one axis": (
        partial(
            init_device_mesh,
            "cpu",
            (4,),
            mesh_dim_names=("a",),
            backend_override=BOTH_FORMS_OF_ONE_AXIS,
        ),
        AxisError,
        "twice",
    ),
    "empty backend": (
        partial(init_device_mesh, "cpu", (4,), backend_override={0: ()}),
        BackendError,
        "both as a pair, got tuple",
    ),
    "unknown backend": (
        partial(init_device_mesh, "cpu", (2, 2), backend_override={0: "pigeon"}),
        BackendError,
        "pigeon",
    ),
    "one rank twice": (
        partial(DeviceMesh, "cpu", [0, 0]),
        MeshError,
        r"\[0\] are repeated in the mesh",
    ),
    "rank beyond the world": (
        partial(DeviceMesh, "cpu", [0, 7]),
        MeshError,
        r"ranks \[7\] are not in the world of 4",
    ),
    "negative rank": (partial(DeviceMesh, "cpu", [-1, 0]), MeshError, r"ranks \[-1\]"),
    "half a rank": (partial(DeviceMesh, "cpu", [0.5]), MeshError, "integers"),
    "empty list": (partial(DeviceMesh, "cpu", []), MeshError, "at least one|integers"),
    "empty tensor": (
        partial(DeviceMesh, "cpu", torch.empty(0, dtype=torch.int)),
        MeshError,
        "at least one rank",
    ),
    "negative own rank": (partial(abstract_mesh, (2,), rank=-1), MeshError, "rank -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_typed_errors(name: str) -> None:
    call, error, text = REFUSED[name]
    with fake_world(4), pytest.raises(error, match=text):
        call()


def test_meshes_of_given_ranks() -> None:
    with fake_world(8, rank=6):
        regular = DeviceMesh("cpu", [[0, 4], [2, 6]], mesh_dim_names=("a", "b"))
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


def test_backend_choices_are_part_of_the_value() -> None:
    with fake_world(4):
        plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        chosen = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"b": "fake"}
        )
        assert plain != chosen
        ranks = torch.arange(4).view(2, 2)
        assert chosen == DeviceMesh(
            "cpu", ranks, mesh_dim_names=("a", "b"), backend_override={"b": "fake"}
        )
        assert chosen["b"]._choices == (BackendChoice("fake"),)
        assert plain["a"] == chosen["a"]
        assert chosen.flatten("f")._choices == (BackendChoice(),)
        assert (
            chosen.unflatten("b", (2, 1), ("c", "d"))._choices[1:] == (BackendChoice("fake"),) * 2
        )
        assert chosen["b"].flatten("g", backend_override="fake")._choices == (
            BackendChoice("fake"),
        )
