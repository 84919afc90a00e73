"""Names with wildcards -> module paths: strings only, no torch.

A path is matched token by token against child names.  Within a token the shell wildcards `*`, `?`
and `[...]` hold (`fnmatch`); the token `**` stands for any number of levels, also none.  The empty
pattern is the root itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple


class Match(NamedTuple):
    """What a pattern matched."""

    paths: tuple[str, ...]  # the matching module paths, in the order of the module tree
    token: str | None = None  # the first token that nothing matched; None if the pattern matched
    reached: str = ""  # the deepest module path at which `token` found no child


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree of child names below a root.

    Example:
        >>> tree = Tree.of(["", "layers", "layers.0", "layers.0.wq", "layers.1", "layers.1.wq", "head"])
        >>> tree.match("layers.*.w?").paths
        ('layers.0.wq', 'layers.1.wq')
        >>> tree.match("**.wq").paths
        ('layers.0.wq', 'layers.1.wq')
        >>> tree.match("layers.*.wk").token
        'wk'
    """

    children: dict[str, Tree] = field(default_factory=dict)

    @classmethod
    def of(cls, paths: Iterable[str]) -> Tree:
        """The tree of dotted paths (parents of a path need not be listed)."""
        root = cls()
        for path in paths:
            node = root
            for token in filter(None, path.split(".")):
                node = node.children.setdefault(token, cls())
        return root

    def match(self, pattern: str) -> Match:
        """Every path that a pattern names, or where it stopped matching."""
        tokens = [token for token in pattern.split(".") if token] if pattern else []
        paths: dict[str, None] = {}
        deepest: list[int | str] = [0, "", tokens[0] if tokens else ""]
        self._walk("", tokens, 0, paths, deepest)
        if paths:
            return Match(tuple(paths))
        return Match((), token=str(deepest[2]), reached=str(deepest[1]))

    def _walk(self, path: str, tokens: list[str], at: int, paths: dict[str, None], deepest: list[int | str]) -> None:
        if at == len(tokens):
            paths[path] = None
            return
        token = tokens[at]
        if at >= int(deepest[0]):
            deepest[:] = [at, path, token]
        if token == "**":
            self._walk(path, tokens, at + 1, paths, deepest)
        for name, child in self.children.items():
            below = f"{path}.{name}" if path else name
            if token == "**":
                child._walk(below, tokens, at, paths, deepest)
            elif fnmatchcase(name, token):
                child._walk(below, tokens, at + 1, paths, deepest)
