"""Covers: tools/contracts.py: faults that `nox -s lint` finds in a small tree of two packages."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

TREE = {
    "low/pyproject.toml": "[project]\ndependencies = []\n",
    "low/src/shoal_low/__init__.py": '"""A facade says nothing."""\nfrom .rules.rule import Rule\n',
    "low/src/shoal_low/errors.py": '"""A file that imports no sibling says nothing."""\n',
    "low/src/shoal_low/checks.py": (
        '"""Checks.\n\nMay import: errors.\n"""\nfrom .errors import Wrong\n'
    ),
    "low/src/shoal_low/layout/__init__.py": '"""Layouts.\n\nMay import: nothing.\n"""\n',
    "low/src/shoal_low/layout/spec.py": "",
    "low/src/shoal_low/rules/__init__.py": '"""Rules.\n\nMay import: checks,\nlayout.\n"""\n',
    "low/src/shoal_low/rules/rule.py": (
        "from . import row\nfrom ..checks import check\nfrom ..layout import spec\n"
    ),
    "low/src/shoal_low/rules/row.py": "",
    "high/pyproject.toml": '[project]\ndependencies = ["shoal-low >= 0.1.0, < 0.2", "torch"]\n',
    "high/src/shoal_high/__init__.py": "from shoal_low import Rule\n",
}
LOW = "packages/low/src/shoal_low"


def findings(root: Path, tree: Path, files: dict[str, str]) -> list[str]:
    """What the contracts find in the tree with some files changed."""
    for name, text in (TREE | files).items():
        path = tree / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found: Any = runpy.run_path(str(root / "tools" / "contracts.py"))["findings"]
    return sorted(found(tree))


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("low/README.md", "", []),  # nothing is wrong
        (  # upwards, inside a function
            "low/src/shoal_low/layout/spec.py",
            "def late():\n    from ..rules.row import Row\n",
            [
                f"{LOW}/layout/spec.py:2: imports rules, which {LOW}/layout/__init__.py does not "
                "allow",
                f"{LOW}: a circle",
            ],
        ),
        # for type checkers only, from a file that says nothing
        (
            "low/src/shoal_low/errors.py",
            "if TYPE_CHECKING:\n    from . import layout\n",
            [f"{LOW}/errors.py:2: imports layout, which {LOW}/errors.py does not allow"],
        ),
        (
            "low/src/shoal_low/layout/__init__.py",
            '"""Layouts."""\n',
            [f"{LOW}/layout/__init__.py: the docstring has no line `May import: ...`"],
        ),
        (
            "low/src/shoal_low/layout/inner/spec.py",
            "",
            [f"{LOW}/layout/inner/__init__.py: the docstring has no line `May import: ...`"],
        ),
        (
            "low/src/shoal_low/layout/__init__.py",
            '"""Layouts.\n\nMay import: checks, gone.\n"""\n',
            [
                f"{LOW}/layout/__init__.py: no file imports checks, which it allows",
                f"{LOW}/layout/__init__.py: no file imports gone, which it allows",
            ],
        ),
        (  # files of one folder
            "low/src/shoal_low/rules/row.py",
            "from .rule import Rule\n",
            [f"{LOW}/rules: a circle"],
        ),
        (  # what a facade takes from below it
            "low/src/shoal_low/errors.py",
            "from . import Rule\n",
            [
                f"{LOW}/errors.py:1: imports __init__, which {LOW}/errors.py does not allow",
                f"{LOW}: a circle",
            ],
        ),
        (  # siblings, and a layer above
            "low/src/shoal_low/layout/spec.py",
            "import shoal_high\n",
            [
                f"{LOW}/layout/spec.py:1: imports high, which packages/low/pyproject.toml does not "
                "allow",
                "packages: a circle",
            ],
        ),
        (
            "high/src/shoal_high/__init__.py",
            "",
            ["packages/high/pyproject.toml: no file imports low, which it allows"],
        ),
    ],
)
def test_contracts(root: Path, tmp_path: Path, file: str, text: str, expected: list[str]) -> None:
    found = findings(root, tmp_path, {file: text})
    # it may begin anywhere
    assert [re.sub("(?<=a circle): .*", "", line) for line in found] == expected
