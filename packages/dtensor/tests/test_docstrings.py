"""Covers: the examples in all docstrings of shoal_dtensor, run as written."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import shoal_dtensor

MODULES = [
    each.name
    for each in pkgutil.walk_packages(shoal_dtensor.__path__, f"{shoal_dtensor.__name__}.")
]


@pytest.mark.parametrize("name", [shoal_dtensor.__name__, *MODULES])
def test_the_examples_of_a_module(name: str) -> None:
    module = importlib.import_module(name)
    assert not doctest.testmod(
        module, extraglobs={"torch": importlib.import_module("torch")}
    ).failed
