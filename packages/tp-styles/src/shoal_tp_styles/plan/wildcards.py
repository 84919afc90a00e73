"""Matching of names with wildcards to module paths: strings only, no torch.

A path is matched token by token against child names.  Within a token the shell wildcards `*`, `?`
and `[...]` hold (`fnmatch`); the token `**` stands for any number of levels, also none.  The empty
pattern is the root itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple


class Match(NamedTuple):
    """The result of matching a pattern.

    Attributes:
        paths: the matching module paths, in the order of the module tree.
        token: the first token that nothing matched; None if the pattern matched.
        position: the position of `token` among the tokens of the pattern.
        reached: a module path that the tokens before `token` name, and that has no child of this
            name; the last one if there are several.
    """

    paths: tuple[str, ...]
    token: str | None = None
    position: int = 0
    reached: str = ""

    @property
    def is_found(self) -> bool:
        """Tell whether the pattern names at least one module."""
        return self.token is None


class Tree:
    """The tree of modules below a root, as dotted paths, parents first.

    Example:
        >>> paths = ["", "layers", "layers.0", "layers.0.wq", "layers.1", "layers.1.wq", "head"]
        >>> tree = Tree(paths)
        >>> tree.match("**.wq").paths
        ('layers.0.wq', 'layers.1.wq')
        >>> tree.match("layers.*.wk").token
        'wk'
    """

    def __init__(self, paths: Iterable[str]) -> None:
        # paths of the children of every path
        self._children: dict[str, list[str]] = {"": []}
        for path in filter(None, paths):
            parent = path.rpartition(".")[0]
            self._children[path] = []
            self._children[parent].append(path)

    def match(self, pattern: str) -> Match:
        """Return every path that a pattern names, or where it stopped matching."""
        # paths that the tokens so far name
        paths = [""]
        for position, token in enumerate(pattern.split(".")):
            if not token:
                continue
            # an ordered set: `**.**` reaches a path in several ways
            found: dict[str, None] = {}
            for path in paths:
                found.update(dict.fromkeys(self._step_down(path, token)))
            if not found:
                return Match((), token, position, reached=paths[-1])
            paths = list(found)
        return Match(tuple(paths))

    def similar_to(self, pattern: str) -> list[str]:
        """Return patterns that match a module and resemble `pattern`, the most similar first.

        The list is empty if `pattern` itself matches a module.

        Example:
            >>> tree = Tree(["", "model", "model.layers", "model.layers.0", "model.layers.0.wq"])
            >>> tree.similar_to("model.layer.0")
            ['model.layers.0']
            >>> tree.similar_to("layers.0.wq")
            ['model.layers.0.wq']
        """
        match = self.match(pattern)
        if match.is_found:
            return []
        tokens = pattern.split(".")
        candidates = self._with_other_token(tokens, match)
        # the pattern lacks a prefix: `layers.0` instead of `model.layers.0`
        candidates += [path for path in self._children if path.endswith(f".{pattern}")]
        # the pattern has a prefix that it should not have: `model.layers.0` instead of `layers.0`
        candidates += [".".join(tokens[count:]) for count in range(1, len(tokens))]
        return [candidate for candidate in candidates if self.match(candidate).paths]

    def _with_other_token(self, tokens: list[str], match: Match) -> list[str]:
        """Return the tokens as patterns in which a similar child replaces the unmatched token."""
        assert match.token is not None, "the pattern does not match any module"
        position = match.position
        children = [_last_token(child) for child in self._children[match.reached]]
        before = tokens[:position]
        after = tokens[position + 1 :]
        similar = get_close_matches(match.token, children, cutoff=0.7)
        return [".".join([*before, child, *after]) for child in similar]

    def _step_down(self, path: str, token: str) -> Iterator[str]:
        """Yield the modules below `path` that `token` names; `**` names `path` and all below."""
        if token == "**":
            yield from self._with_descendants(path)
            return
        for child in self._children[path]:
            if fnmatchcase(_last_token(child), token):
                yield child

    def _with_descendants(self, path: str) -> Iterator[str]:
        yield path
        for child in self._children[path]:
            yield from self._with_descendants(child)


def _last_token(path: str) -> str:
    """Return the name of a module in its parent."""
    return path.rpartition(".")[2]
