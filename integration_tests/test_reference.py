"""Covers: docs/reference/*.md: every public name of a layer is on its page, once."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from typing import Any


def test_every_public_name_has_its_entry(layer: Any, root: Any) -> None:
    module = importlib.import_module(layer.name)
    page = (root / "docs" / "reference" / f"{layer.name}.md").read_text()
    page = re.sub(r"^\.\. module:: .*?^```", "", page, flags=re.MULTILINE | re.DOTALL)  # of errors and internal names
    listed = Counter(re.findall(r"^\.\. auto(?:class|data|exception|function):: (\w+)$", page, re.MULTILINE))
    values = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
    # What a layer passes on from the one below is on that one's page.
    homes = {name: getattr(value, "__module__", "").split(".")[0] for name, value in values.items()}
    passed_on = {name for name, home in homes.items() if home in layer.below}
    public = {name for name, value in values.items() if not inspect.ismodule(value)} - passed_on
    assert set(listed) == public
    assert not [name for name, times in listed.items() if times > 1]
