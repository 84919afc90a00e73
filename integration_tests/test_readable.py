"""Covers: tools/readable.py: statements that `nox -s lint` refuses, each beside one it allows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REFUSED = {
    "two values": ("a, b = 1, 2", "one value for each assignment"),
    "two targets": ("a = b = 1", "one target for each assignment"),
    "conditional in a tuple": (
        "a = (1, 2 if x else 3)",
        "a name for the conditional in this tuple",
    ),
    "nested comprehension": (
        "a = [[y for y in x] for x in z]",
        "a name or a loop for the expression inside of this comprehension",
    ),
    "comment behind code": (f"a = 1  # {'long ' * 9}", "the comment above this line"),
    "comment that is read as a type": (
        "# its\n# type: a subclass\na = 1",
        'another first word than "type:" in this line of a comment',
    ),
    "fifth positional argument": (
        "def f(a, b, c, d, e): ...\nf(1, 2, 3, 4, 5)",
        "keywords for the arguments of f after the fourth",
    ),
    "tuple as a result": (
        "def f() -> tuple[int, int, str]: ...",
        "a NamedTuple for tuple[int, int, str]",
    ),
    "tuples as a parameter": (
        "def f(a: list[tuple[int, int, str]]): ...",
        "a NamedTuple for tuple[int, int, str]",
    ),
    "name of a tuple": ("A = tuple[int, int, str]", "a NamedTuple for tuple[int, int, str]"),
    "tuple as Any": (
        "def f() -> Any:\n    return 1, 2, 3",
        "a NamedTuple for the tuple that f returns",
    ),
}
ALLOWED = [
    "a, b = b, a",
    "a, b = f()",
    "a = 1 if x else 2",
    "a = [y for x in z for y in x]",
    "a = 1  # short",
    "def f(a, b, c, d, e): ...\nf(1, 2, 3, 4, e=5)",
    "def f() -> tuple[int, str]: ...",
    "def f() -> tuple[int, ...]: ...",
    # a key: nobody unpacks it
    "def f() -> Hashable:\n    return 1, 2, 3",
    # torch unpacks it
    "class F:\n    @staticmethod\n"
    "    def backward() -> tuple[int, None, None]:\n        return 1, None, None",
]


def _lint(root: Path, folder: Path, text: str) -> str:
    """Return the findings in a file with this text."""
    (folder / "a.py").write_text(f"{text}\n")
    command = [sys.executable, str(root / "tools" / "readable.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (not done.stdout.startswith("every statement")), done.stderr
    return done.stdout


@pytest.mark.parametrize("case", REFUSED)
def test_statements_that_are_refused(root: Path, tmp_path: Path, case: str) -> None:
    text, advice = REFUSED[case]
    assert advice in _lint(root, tmp_path, text)


def test_statements_that_are_allowed(root: Path, tmp_path: Path) -> None:
    for text in ALLOWED:
        assert _lint(root, tmp_path, text).startswith("every statement"), text
