"""Covers: facades.py: the error for a name of another package names that package."""

from __future__ import annotations

import pytest

import shoal_mesh
from shoal_mesh.errors import MeshError
from shoal_mesh.facades import OldAttribute, replaced_names

NAME = shoal_mesh.__name__  # also in a host that vendors it
AROUND = NAME.removesuffix("shoal_mesh")


def test_an_import_says_where_a_name_is() -> None:
    with pytest.raises(
        ImportError, match=f"{NAME} has no fully_shard: it is in {AROUND}shoal_data_parallel"
    ):
        from shoal_mesh import fully_shard  # noqa: F401  # on purpose
    with pytest.raises(ImportError, match="cannot import name 'unheard_of'"):
        from shoal_mesh import unheard_of  # noqa: F401  # on purpose


def test_an_attribute_says_where_it_is_and_is_absent() -> None:
    assert not hasattr(shoal_mesh, "DTensor")
    with pytest.raises(
        AttributeError, match=f"{NAME} has no DTensor: it is in {AROUND}shoal_dtensor"
    ):
        _ = shoal_mesh.DTensor
    with pytest.raises(AttributeError, match=f"module '{NAME}' has no attribute 'unheard_of'"):
        _ = shoal_mesh.unheard_of


def test_an_old_name_gives_the_class_that_replaces_it() -> None:
    old_name = replaced_names("shapes", {"RingError": MeshError})
    with pytest.warns(
        DeprecationWarning, match=rf"shapes.RingError is now {NAME}.errors.MeshError"
    ):
        assert old_name("RingError") is MeshError
    with pytest.raises(AttributeError, match="module 'shapes' has no attribute 'StarError'"):
        old_name("StarError")


def test_an_old_attribute_gives_the_one_that_replaces_it() -> None:
    class Ring:
        members = 3
        count = OldAttribute("members")

    with pytest.warns(DeprecationWarning, match=r"Ring.count is now Ring.members"):
        assert Ring().count == 3
