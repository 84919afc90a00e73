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
    """The result of matching a pattern."""

    # the matching module paths, in the order of the module tree
    paths: tuple[str, ...]
    # the first token that nothing matched; None if the pattern matched
    token: str | None = None
    # the deepest module path at which `token` found no child
    reached: str = ""


class Tree:
    """The tree of modules below a root, as dotted paths, parents first.

    Example:
        >>> tree = Tree(["", "layers", "layers.0", "layers.0.wq", "layers.1", "layers.1.wq", "head"])
        >>> tree.match("**.wq").paths
        ('layers.0.wq', 'layers.1.wq')
        >>> tree.match("layers.*.wk").token
        'wk'
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._children: dict[str, list[str]] = {"": []}  # paths of the children of every path
        for path in filter(None, paths):
            self._children[path] = []
            self._children[path.rpartition(".")[0]].append(path)

    def match(self, pattern: str) -> Match:
        """Return every path that a pattern names, or where it stopped matching."""
        paths = [""]  # that the tokens so far name
        for token in filter(None, pattern.split(".")):
            if token == "**":
                found = [below for path in paths for below in self._with_descendants(path)]
            else:
                children = [child for path in paths for child in self._children[path]]
                found = [
                    child for child in children if fnmatchcase(child.rpartition(".")[2], token)
                ]
            if not found:
                return Match((), token, paths[-1])
            paths = list(dict.fromkeys(found))
        return Match(tuple(paths))

    def similar_to(self, pattern: str) -> list[str]:
        """Return patterns that match, similar to one that matches nothing; the most similar first.

        Example:
            >>> tree = Tree(["", "model", "model.layers", "model.layers.0", "model.layers.0.wq"])
            >>> tree.similar_to("model.layer.0")
            ['model.layers.0']
            >>> tree.similar_to("layers.0.wq")
            ['model.layers.0.wq']
        """
        match = self.match(pattern)
        if match.token is None:
            return []
        names = [child.rpartition(".")[2] for child in self._children[match.reached]]
        tokens = pattern.split(".")
        prefixes = [".".join(tokens[: count + 1]) for count in range(len(tokens))]
        at = next(i for i, prefix in enumerate(prefixes) if not self.match(prefix).paths)
        similar = [
            ".".join([*tokens[:at], name, *tokens[at + 1 :]])
            for name in get_close_matches(match.token, names, cutoff=0.7)
        ]
        # a prefix too few, or one too many
        longer = [path for path in self._children if path.endswith(f".{pattern}")]
        shorter = [".".join(tokens[count:]) for count in range(1, len(tokens))]
        candidates = [*similar, *longer, *shorter]
        return [candidate for candidate in candidates if self.match(candidate).paths]

    def _with_descendants(self, path: str) -> Iterator[str]:
        yield path
        for child in self._children[path]:
            yield from self._with_descendants(child)
