"""Sphinx extension that resolves navigation outside of the contents once for each folder.

Furo shows the whole tree of contents beside each page, and Sphinx resolves it again for each of 600
pages, which took most of a build. Pages of names and of sources are not in the tree: no entry is
marked as the page that is read, so pages of one folder have the same navigation.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from typing import Any

# Furo reads the context with the default priority, 500.
BEFORE_FURO = 400


class SharedNavigation:
    """The trees of contents of one build, by folder and by the options of the theme."""

    def __init__(self) -> None:
        self._trees: dict[object, str] = {}
        self._pages_in_contents: set[str] = set()

    def begin(self, _app: Any, env: Any) -> None:
        """Forget the trees of an earlier build."""
        self._trees.clear()
        self._pages_in_contents = {env.config.root_doc}
        for pages in env.toctree_includes.values():
            self._pages_in_contents.update(pages)

    def share(
        self, _app: Any, page: str, _template: str, context: dict[str, Any], _tree: object
    ) -> None:
        """Give a page outside of the contents the tree of its folder."""
        if page in self._pages_in_contents or "toctree" not in context:
            return
        resolve: Callable[..., str] = context["toctree"]
        folder = posixpath.dirname(page)

        def resolve_once(**options: object) -> str:
            key = (folder, *sorted(options.items()))
            if key not in self._trees:
                self._trees[key] = resolve(**options)
            return self._trees[key]

        context["toctree"] = resolve_once


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    navigation = SharedNavigation()
    app.connect("env-updated", navigation.begin)
    app.connect("html-page-context", navigation.share, priority=BEFORE_FURO)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
