"""Covers: facades.py: the error for a name of another package names that package."""

from __future__ import annotations

import pytest

import shoal_mesh

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
