"""Covers: README.md, the examples in docstrings, and the names of the package.

The blocks of README.md run on four ranks.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
import pkgutil
import re
import warnings
from pathlib import Path

import pytest
import torch

import shoal_shard_api
from shoal_mesh.testing import rank_pool
from shoal_shard_api.checkpoint import load, save

README = Path(__file__).parents[1] / "README.md"
MODULES = [
    each.name for each in pkgutil.walk_packages(shoal_shard_api.__path__, "shoal_shard_api.")
]


def run(code: str) -> None:
    warnings.simplefilter("ignore")  # torch's own, on saving
    exec(code, {"__name__": "__readme__"})


def test_the_blocks_run_in_order() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    rank_pool(4).run(run, "\n".join(blocks))


def run_examples(name: str) -> str:
    """Failures of examples in a module's docstrings, which may use every public name and torch."""
    names = {each: getattr(shoal_shard_api, each) for each in shoal_shard_api.__all__}
    names |= {"torch": torch, "save": save, "load": load}
    runner, report = doctest.DocTestRunner(), io.StringIO()
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder().find(module, name, extraglobs=names):
        runner.run(test, out=report.write)
    return report.getvalue()


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings(name: str) -> None:
    assert rank_pool(2).run(run_examples, name) == ["", ""]


def test_every_public_function_and_class_has_an_example() -> None:
    values = [getattr(shoal_shard_api, each) for each in shoal_shard_api.__all__]
    documented = [each for each in values if (inspect.isclass(each) or inspect.isfunction(each))]
    missing = [each.__name__ for each in documented if ">>>" not in (inspect.getdoc(each) or "")]
    errors = [name for name in missing if name.endswith("Error")]
    assert sorted(set(missing) - set(errors)) == []


def test_all_and_dir_have_public_names_only() -> None:
    assert dir(shoal_shard_api) == sorted(shoal_shard_api.__all__)
    assert not [
        each for each in shoal_shard_api.__all__ if each.startswith("_") and each != "__version__"
    ]
