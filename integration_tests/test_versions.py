"""Covers: packages/*/pyproject.toml, __about__.py and CHANGELOG.md: one version in all of them."""

from __future__ import annotations

import importlib
import tomllib
from typing import Any


def version(layer: Any) -> str:
    found: str = importlib.import_module(layer.name).__version__
    return found


def test_the_layers_have_one_version(layers: Any) -> None:
    assert len({version(layer) for layer in layers}) == 1


def test_siblings_are_pinned_to_the_minor_version(layer: Any) -> None:
    project = tomllib.loads((layer.home / "pyproject.toml").read_text())["project"]
    major, minor, _ = version(layer).split(".")
    pins = {f"{name.replace('_', '-')} == {major}.{minor}.*" for name in layer.below}
    assert pins == {text for text in project["dependencies"] if text.startswith("shoal")}


def test_the_changelog_opens_with_the_version(layer: Any) -> None:
    headings = [line for line in (layer.home / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].split()[1] == version(layer)


def test_one_license(layer: Any, root: Any) -> None:
    assert (layer.home / "LICENSE").read_text() == (root / "LICENSE").read_text()
