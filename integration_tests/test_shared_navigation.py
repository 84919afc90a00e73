"""Covers: docs/_ext/shared_navigation.py: pages of the documentation that share a contents tree."""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import pytest


class Build:
    """A build whose theme asks for trees, and how often they were resolved."""

    def __init__(self, root: Any) -> None:
        extension = runpy.run_path(str(root / "docs" / "_ext" / "shared_navigation.py"))
        self.navigation = extension["SharedNavigation"]()
        self.resolved: list[str] = []
        self.begin()

    def begin(self) -> None:
        includes = {"index": ["how-to/index"], "how-to/index": ["how-to/compile"]}
        env = SimpleNamespace(config=SimpleNamespace(root_doc="index"), toctree_includes=includes)
        self.navigation.begin(None, env)

    def tree_of(self, page: str, **options: object) -> str:
        def resolve(**options: object) -> str:
            self.resolved.append(page)
            return f"seen from {page} with {options}"

        context: dict[str, Any] = {"toctree": resolve}
        self.navigation.share(None, page, "page.html", context, None)
        tree: str = context["toctree"](**options)
        return tree


@pytest.fixture
def build(root: Any) -> Build:
    return Build(root)


def test_pages_outside_of_the_contents_share_the_tree_of_their_folder(build: Build) -> None:
    first = build.tree_of("_modules/shoal_mesh/errors")
    assert build.tree_of("_modules/shoal_mesh/events") == first
    assert build.tree_of("_modules/shoal_lab/errors") != first, "its links begin in another folder"
    assert build.tree_of("_modules/shoal_mesh/events", maxdepth=1) != first
    assert len(build.resolved) == 3


@pytest.mark.parametrize("page", ["index", "how-to/index", "how-to/compile"])
def test_a_page_of_the_contents_is_marked_in_its_own_tree(build: Build, page: str) -> None:
    build.tree_of("search")
    build.tree_of("how-to/unlisted")
    assert build.tree_of(page).startswith(f"seen from {page} ")


def test_a_build_forgets_the_trees_of_the_build_before(build: Build) -> None:
    build.tree_of("search")
    build.begin()
    build.tree_of("genindex")
    assert build.resolved == ["search", "genindex"]


def test_pages_without_a_tree_are_left_alone(build: Build) -> None:
    context: dict[str, Any] = {}
    build.navigation.share(None, "search", "page.html", context, None)
    assert context == {}
