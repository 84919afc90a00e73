"""The examples of docstrings run, of every module of the package.

Covers: internal.py, all others.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import shoal_context_parallel

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(
        shoal_context_parallel.__path__, f"{shoal_context_parallel.__name__}."
    )
    if not info.name.endswith("__about__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(
        module, extraglobs={"torch": torch}, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert not failed


def test_what_users_call_has_an_example() -> None:
    without = [
        name
        for name in shoal_context_parallel.__all__
        if callable(getattr(shoal_context_parallel, name))
        and not issubclass(type(getattr(shoal_context_parallel, name)), type)
        and ">>>" not in (getattr(shoal_context_parallel, name).__doc__ or "")
    ]
    assert without == []
