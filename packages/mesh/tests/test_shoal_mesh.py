"""Covers: the package itself: its public names and the examples of its docstrings."""

from __future__ import annotations

import ast
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
                    # neither sends anything
                    or name in {"check_targets", "adjoint_types"}
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
    # One test file may cover several files of a folder, and names them.
    covered = {path.stem: covered_modules(path) for path in Path(__file__).parent.glob("test_*.py")}
    found = set().union(*covered.values())
    assert modules - tests - found == {"test_about", "test_internal"}
    for topic in tests - modules - {"test_shoal_mesh", "test_readme"}:
        assert covered[topic] & modules, topic


def covered_modules(test: Path) -> set[str]:
    """Return the names of the test files of the modules and folders that a test file covers."""
    docstring = ast.get_docstring(ast.parse(test.read_text())) or ""
    _, _, text = docstring.partition("Covers:")
    names = re.findall(r"(\w+)\.py", text)
    for folder in re.findall(r"(\w+)/(?!\w)", text):
        names += [_name(m).rpartition(".")[2] for m in MODULES if f".{folder}." in m.__name__]
    return {f"test_{name.strip('_')}" for name in names}
