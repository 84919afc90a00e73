"""Covers: packages/*/pyproject.toml, __about__.py, CHANGELOG.md.

There is one version, dependencies are true, and no links are dead.
"""

from __future__ import annotations

import importlib
import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest


def pyproject(home: Path) -> dict[str, Any]:
    return tomllib.loads((home / "pyproject.toml").read_text())


def version(layer: Any) -> str:
    found: str = importlib.import_module(layer.name).__version__
    return found


def test_the_layers_have_one_version(layers: Any) -> None:
    assert len({version(layer) for layer in layers}) == 1


def test_layers_below_are_pinned_from_the_own_version_to_the_next_minor(layer: Any) -> None:
    major, minor, _ = version(layer).split(".")
    pins = {
        f"{name.replace('_', '-')} >= {version(layer)}, < {major}.{int(minor) + 1}"
        for name in layer.below
    }
    assert pins == {
        text
        for text in pyproject(layer.home)["project"]["dependencies"]
        if text.startswith("shoal")
    }


def dependencies_of_all(root: Path) -> list[str]:
    """Return the dependencies of packages/shoal, as its hook of hatchling fills them in."""
    home = root / "packages" / "shoal"
    hook = runpy.run_path(str(home / "hatch_build.py"))["LayersAsDependencies"]
    table = pyproject(home)["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    metadata: dict[str, Any] = {
        "version": runpy.run_path(str(home / "__about__.py"))["__version__"]
    }
    hook(str(home), table).update(metadata)
    found: list[str] = metadata["dependencies"]
    return found


def test_one_package_depends_on_all_folders_of_a_clone(
    layers: Any, root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_PINS", raising=False)
    assert set(dependencies_of_all(root)) == {
        f"shoal-{layer.folder} @ {layer.home.as_uri()}" for layer in layers
    }


def test_one_package_pins_all_layers_where_it_is_built_for_an_index(
    layers: Any, root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_PINS", "1")
    major, minor, _ = version(layers[0]).split(".")
    bounds = f">= {version(layers[0])}, < {major}.{int(minor) + 1}"
    assert set(dependencies_of_all(root)) == {f"shoal-{layer.folder} {bounds}" for layer in layers}
    home = root / "packages" / "shoal"
    assert f"## {version(layers[0])} " in (home / "CHANGELOG.md").read_text()
    assert (home / "LICENSE").read_text() == (root / "LICENSE").read_text()


def test_extras_are_used(layer: Any) -> None:
    # IPython is called ipython on the index
    source = "\n".join(path.read_text().lower() for path in layer.files)
    for names in pyproject(layer.home)["project"].get("optional-dependencies", {}).values():
        for name in names:
            module = name.partition("[")[0].partition(">")[0].strip().replace("-", "_")
            assert f"import {module}" in source or f"from {module}" in source, (
                f"no file imports {module}"
            )


def test_an_sdist_is_tested_as_the_repository_is(layer: Any, root: Any) -> None:
    ours, its = (pyproject(home)["tool"]["pytest"]["ini_options"] for home in (root, layer.home))
    assert its == ours | {"testpaths": ["tests"]}
    groups = pyproject(root)["dependency-groups"]
    installed = {*groups["test"], *groups["extras"], *groups["models"]}
    assert set(pyproject(layer.home)["dependency-groups"]["test"]) <= installed


def test_the_long_description_has_no_dead_links(layer: Any) -> None:
    """An index shows the README alone: a link to a file of the repository leads nowhere there."""
    assert not re.findall(r"\]\((?!https?://|#)", (layer.home / "README.md").read_text())


def test_the_changelog_opens_with_the_version(layer: Any) -> None:
    headings = [
        line
        for line in (layer.home / "CHANGELOG.md").read_text().splitlines()
        if line.startswith("## ")
    ]
    assert headings[0].split()[1] == version(layer)


def test_what_repeats_a_version_agrees(layers: Any, root: Any) -> None:
    assert f"version: {version(layers[0])}\n" in (root / "CITATION.cff").read_text()
    ruff = re.search(r"^ruff==([\d.]+)", (root / "constraints.txt").read_text(), re.MULTILINE)
    assert ruff and f"rev: v{ruff[1]}\n" in (root / ".pre-commit-config.yaml").read_text()


def test_one_license(layer: Any, root: Any) -> None:
    assert (layer.home / "LICENSE").read_text() == (root / "LICENSE").read_text()


def test_torch_is_bounded_by_what_was_run(layer: Any, root: Any) -> None:
    """The metadata's bounds, the table of what was run, and the sessions say the same versions."""
    (declared,) = [
        text
        for text in pyproject(layer.home)["project"]["dependencies"]
        if text.startswith("torch")
    ]
    assert declared in pyproject(root)["dependency-groups"]["runtime"]
    page = (root / "docs" / "releasing.md").read_text()
    oldest, last = re.findall(r"2\.(\d+)", declared)
    ran = sorted({int(minor) for minor in re.findall(r"^\| 2\.(\d+)", page, re.MULTILINE)})
    assert f"`{declared}`" in page
    assert (ran[0], ran[-1]) == (int(oldest), int(last) - 1)
    assert f'"torch==2.{oldest}.*"' in (root / "noxfile.py").read_text()
    assert f"torch 2.{oldest} to 2.{ran[-1]}" in (layer.home / "README.md").read_text()


def test_every_python_is_checked_in_public(layer: Any, root: Any) -> None:
    classified = re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"', (layer.home / "pyproject.toml").read_text()
    )
    matrix = re.search(
        r"matrix: \{ python: (\[.*?\])", (root / ".github" / "workflows" / "checks.yml").read_text()
    )
    assert matrix and json.loads(matrix[1]) == classified
