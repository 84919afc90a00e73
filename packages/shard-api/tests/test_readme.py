"""Covers: README.md (its blocks run, in order, on four ranks) and the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import re
import warnings
from pathlib import Path

import pytest

from shoal_mesh.testing import rank_pool

README = Path(__file__).parents[1] / "README.md"
MODULES = ("boxes", "chunk_spec", "enumerable_spec", "plan", "reshard", "spec", "ops")


def run(code: str) -> None:
    warnings.simplefilter("ignore")  # torch's own, on saving
    exec(code, {"__name__": "__readme__"})


def test_the_blocks_run_in_order() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    rank_pool(4).run(run, "\n".join(blocks))


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(f"shoal_shard_api.{name}")
    failed, tried = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert tried
    assert not failed
