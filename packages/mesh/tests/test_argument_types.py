"""Covers: argument_types.py: errors about arguments of a wrong type, and texts that name ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal_mesh import (
    CollectiveError,
    DeviceMesh,
    ElasticWorld,
    MeshError,
    comm_over,
    init_device_mesh,
    lockstep,
)
from shoal_mesh.argument_types import (
    by_ranks,
    kind_of,
    name_ranks,
    require,
    require_each,
    suggests_keywords,
)
from shoal_mesh.errors import CollectiveTypeError, MeshTypeError
from shoal_mesh.testing import fake_world
from wrong_calls import public_calls, wrong_values


def is_accepted(check: Callable[..., None], value: object, kind: object) -> bool:
    """Return whether a check lets a value pass."""
    try:
        check(value, kind, "a value")
    except MeshTypeError:
        return False
    return True


def test_values_of_the_right_type_pass() -> None:
    assert is_accepted(require, 1, int)
    assert is_accepted(require, None, int | None)
    assert is_accepted(require_each, (1, 2), int)
    assert is_accepted(require_each, [], int)
    assert not is_accepted(require, None, int)
    assert not is_accepted(require_each, (1, None), int)


def test_classes_without_some_of_their_subclasses() -> None:
    require(1, int, "a dim is an int", without=bool)
    require_each([1], int, "dims are ints", without=bool)
    with pytest.raises(MeshTypeError, match="a dim is an int, got bool True"):
        require(True, int, "a dim is an int", without=bool)
    with pytest.raises(MeshTypeError, match="dims are ints, got list with bool True at 0"):
        require_each([True], int, "dims are ints", without=bool)


def test_errors_say_what_is_taken_and_what_was_passed() -> None:
    with pytest.raises(MeshTypeError, match=r"a rank is an int, got str '3'"):
        require("3", int, "a rank is an int")
    with pytest.raises(CollectiveTypeError, match="got None"):
        require(None, int, "a dim is an int", CollectiveTypeError)
    for values, text in (
        ("12", "got str '12'"),
        (5, "got int 5"),
        ([1, "2"], "got list with str '2' at 1"),
    ):
        with pytest.raises(MeshTypeError, match=text):
            require_each(values, int, "ranks are ints")


def test_kinds() -> None:
    assert kind_of(torch.ones(10_000)) == "torch.Tensor of shape (10000,)"
    assert len(kind_of("x" * 1000)) < 100


def test_torchs_mesh_has_a_way_out() -> None:
    from torch.distributed.device_mesh import init_device_mesh as torchs

    with fake_world(2):
        text = kind_of(torchs("cpu", (2,)))
    assert "torch.distributed.device_mesh.DeviceMesh" in text
    assert "DeviceMesh.from_group(m.get_all_groups()" in text


def _names() -> list[str]:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        return list(public_calls(mesh, mesh.comm("b"), Path()))


@pytest.mark.parametrize("name", _names())
def test_wrong_arguments_of_public_functions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused by an error of this package, which says what it got.

    Otherwise it happens to be a right one.
    """
    monkeypatch.chdir(tmp_path)  # some of the values are names of files
    unexpected = []
    with fake_world(2):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        comm = mesh.comm("b")
        call = public_calls(mesh, comm, tmp_path)[name]
        for parameter in call.valid:
            for kind, value in wrong_values(mesh, comm).items():
                try:
                    call.function(**{**call.valid, parameter: value})
                except (MeshError, CollectiveError) as error:
                    refused = not isinstance(error, TypeError) or "got" in str(error)
                except OSError:  # a file that cannot be written
                    refused = True
                except Exception as error:
                    # torch's own, which says nothing of the call
                    unexpected.append((parameter, kind, repr(error)))
                    continue
                else:
                    refused = False
                if refused == (kind in call.accepted.get(parameter, set())):
                    unexpected.append((parameter, kind, "refused" if refused else "accepted"))
    assert unexpected == []


def test_ranks_that_say_the_same_are_named_together() -> None:
    assert [name_ranks(ranks) for ranks in ([3], (1, 0), [0, 1, 2, 7])] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 0-2, 7",
    ]
    assert by_ranks({0: "a", 1: "b", 2: "a"}) == {"ranks 0, 2": "a", "rank 1": "b"}


KEYWORDS: dict[str, tuple[Callable[..., object], dict[str, Any], str]] = {
    "mesh": (init_device_mesh, {"mesh_dim_name": ("x",)}, "mesh_dim_names"),
    "class": (DeviceMesh, {"mesh_dim_name": ("x",)}, "mesh_dim_names"),
    "classmethod": (DeviceMesh.from_group, {"mesh_dimnames": ("x",)}, "mesh_dim_names"),
    "block": (lockstep, {"time_out": 3.0}, "timeout"),
    "communicator": (comm_over, {"rank": (0, 1)}, "ranks"),
    "elastic world": (ElasticWorld, {"time_out": 3.0}, "timeout"),
}


@pytest.mark.parametrize("call", KEYWORDS)
def test_an_unknown_keyword_is_named_with_a_similar_one(call: str) -> None:
    function, keywords, similar = KEYWORDS[call]
    (wrong,) = keywords
    message = rf"keyword argument '{wrong}'; did you mean '{similar}'\?; it takes "
    with pytest.raises(MeshTypeError, match=message):
        function(**keywords)


def test_an_error_of_the_function_itself_stays() -> None:
    @suggests_keywords()
    def halve(value: float) -> float:
        return value / 2

    assert halve(value=3) == 1.5
    assert halve.__name__ == "halve"
    with pytest.raises(TypeError, match="unsupported operand"):
        halve(value="3")  # type: ignore[arg-type]  # a wrong value
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        halve()  # type: ignore[call-arg]  # a missing argument
