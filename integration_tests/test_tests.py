"""Covers: the tests: every module has tests, and a test file names the modules that it tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

# Names and classes; other files' tests raise every error.
WITHOUT_TESTS = {"__about__.py", "__init__.py", "errors.py", "internal.py"}


def names(word: str) -> Iterator[str]:
    """`a/{b,c}.py` -> `a/b.py`, `a/c.py`."""
    parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", word)]
    yield from map("".join, product(*parts))


def covered(test: Path) -> list[str]:
    """The files and folders that a test file says it covers."""
    text = ast.get_docstring(ast.parse(test.read_text())) or ""
    _, _, covers = text.partition("Covers:")
    words = re.findall(r"[\w/]*(?:\{[\w,]*\}[\w/]*)?(?:\.py|/(?![\w{]))", covers.split("\n\n")[0])
    return [name for word in words if word.strip("/") for name in names(word)]


def modules_of(layer: Any, name: str) -> set[Path]:
    """The modules of a layer that a name stands for: a path from any folder down."""
    if name.endswith("/"):
        return {path for path in layer.files if f"/{name}" in f"/{path.relative_to(layer.source)}"}
    return {
        path
        for path in layer.files
        if f"/{layer.name}/{path.relative_to(layer.source)}".endswith(f"/{name}")
    }


def files_of_tests(layer: Any) -> list[Path]:
    """The test files of a package, and of the repository."""
    return [
        *sorted((layer.home / "tests").glob("test_*.py")),
        *sorted(Path(__file__).parent.rglob("test_*.py")),
    ]


def test_a_test_file_names_modules_that_exist(layer: Any) -> None:
    tests = sorted((layer.home / "tests").glob("test_*.py"))
    wrong = {
        test.name: [name for name in covered(test) if not modules_of(layer, name)] for test in tests
    }
    assert {test: missing for test, missing in wrong.items() if missing} == {}


def test_every_module_is_covered_by_a_test_file(layer: Any) -> None:
    with_tests = {
        path
        for test in files_of_tests(layer)
        for name in covered(test)
        for path in modules_of(layer, name)
    }
    without = [
        path for path in layer.files if path not in with_tests and path.name not in WITHOUT_TESTS
    ]
    assert [str(path.relative_to(layer.source)) for path in without] == []


def test_a_test_file_is_named_after_a_module_or_says_what_else_it_shows(layer: Any) -> None:
    modules = {path.stem.lstrip("_") for path in layer.files} | {layer.name}
    for test in sorted((layer.home / "tests").glob("test_*.py")):
        name = test.stem.removeprefix("test_").removesuffix("_on_ranks")
        text = ast.get_docstring(ast.parse(test.read_text())) or ""
        # Behaviour of several modules has a first line, or words after its "Covers:", that say what
        # is shown.
        says = re.sub(r"[\w/]*\.py|Covers:|[,. ]", "", text.split("\n\n")[0])
        assert "Covers:" in text and (name in modules or says), (
            f"{test.name} is about no module and does not say what"
        )
