"""Covers: the package itself: its public names and the examples of its docstrings."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal_mesh

MODULES = [
    shoal_mesh,
    *(
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(shoal_mesh.__path__, f"{shoal_mesh.__name__}.")
    ),
]


def _name(module: ModuleType) -> str:
    return module.__name__.removeprefix(f"{shoal_mesh.__name__}.")


@pytest.mark.parametrize("module", MODULES, ids=_name)
def test_examples_in_docstrings_run(module: ModuleType) -> None:
    # What examples take for granted: `import torch, torch.distributed as dist` and `from shoal_mesh
    # import *`.
    assumed = {name: getattr(shoal_mesh, name) for name in shoal_mesh.__all__} | {
        "torch": torch,
        "dist": dist,
    }
    names: dict[str, Any] = {**assumed, **vars(module)}
    results = doctest.testmod(module, globs=names, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert results.failed == 0


def test_every_public_function_and_class_has_a_docstring_and_collectives_their_type() -> None:
    documented = {
        name: value for name, value in vars(shoal_mesh).items() if name in shoal_mesh.__all__
    }
    missing = [
        name
        for name, value in documented.items()
        if inspect.isroutine(value) or inspect.isclass(value)
        if not (inspect.getdoc(value) or "").strip()
    ]
    assert missing == []
    for module in MODULES:
        if re.search(r"collectives\.(even|uneven|packed)$|\.differentiable$", module.__name__):
            own = (
                name
                for name, value in vars(module).items()
                if getattr(value, "__module__", "") == module.__name__
            )
            for name in own:
                if (
                    name.startswith("_")
                    or inspect.isclass(getattr(module, name))
                    or name == "check_targets"
                ):
                    continue
                assert re.match(
                    r"`[^`]+ -> [^`]+`[:,]", inspect.getdoc(getattr(module, name)) or ""
                ), name


def test_the_facade_lists_its_names() -> None:
    assert dir(shoal_mesh) == sorted(shoal_mesh.__all__)
    assert len(set(shoal_mesh.__all__)) == len(shoal_mesh.__all__)


def test_every_module_has_a_test_file() -> None:
    tests = {path.stem for path in Path(__file__).parent.glob("test_*.py")}
    modules = {
        f"test_{_name(m).rpartition('.')[2].strip('_')}"
        for m in MODULES
        if not hasattr(m, "__path__")
    }
    assert modules - tests == {"test_about", "test_internal"}
    # a second file of a module says which
    for topic in tests - modules - {"test_shoal_mesh", "test_readme"}:
        covers = re.match(
            r'"""Covers: _?(\w+)\.py', (Path(__file__).parent / f"{topic}.py").read_text()
        )
        assert covers is not None
        assert f"test_{covers[1]}" in modules, topic
