"""Covers: `check_types`, `check_device_mesh` and `submodule_of` of argument_types.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from shoal_dtensor.argument_types import check_device_mesh, check_types, submodule_of
from shoal_dtensor.errors import LayoutError, StyleTypeError


@check_types(module=(nn.Module, list), count=int)
def function(module: Any, count: int = 1) -> tuple[Any, int]:
    return module, count


def test_what_is_taken_is_handed_on() -> None:
    modules = [nn.Identity(), nn.Identity()]
    assert function(modules[0], count=2) == (modules[0], 2)
    assert function(modules) == (modules, 1)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((3,), "function: module is an nn.Module, got int 3"),
        (([nn.Identity(), 1],), "function: module is an nn.Module, got int 1"),
        (([],), "function: module is an nn.Module, got list []"),
        ((nn.Identity(), "2"), "function: count is an int, got str '2'"),
    ],
)
def test_what_is_not_taken(args: Any, text: str) -> None:
    with pytest.raises(StyleTypeError) as caught:
        function(*args)
    assert str(caught.value) == text


def test_what_is_no_mesh_and_no_stage() -> None:
    with pytest.raises(
        LayoutError,
        match=r"f: device_mesh is builtins.str; make one with shoal_mesh.init_device_mesh",
    ):
        check_device_mesh("f", "tp")
    module = nn.Identity()
    assert submodule_of("f", SimpleNamespace(submod=module)) is module
    with pytest.raises(
        StyleTypeError,
        match=r"f: the submod of stage is an nn.Module, got None",
    ):
        submodule_of("f", module)
