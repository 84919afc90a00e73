"""Covers: the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import shoal_spmd_types
from shoal_dtensor.testing import simulate_ranks
from shoal_mesh import abstract_mesh

MODULES = [
    found.name
    for found in pkgutil.walk_packages(shoal_spmd_types.__path__, f"{shoal_spmd_types.__name__}.")
    if not found.name.endswith(".__about__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    names = {name: getattr(shoal_spmd_types, name) for name in shoal_spmd_types.__all__}
    names |= {"torch": torch, "abstract_mesh": abstract_mesh, "simulate_ranks": simulate_ranks}
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    result = doctest.testmod(module, extraglobs={**vars(module), **names}, optionflags=flags)
    assert result.failed == 0
