"""Finds words that `glossary.md` has a better one for, and counts vague words.

Run: ``python tools/words.py [FILE ...]``.

Vague words are counted per 1,000 words of docstrings, comments, error texts and pages. `GROUPS` has
the highest rate of each group of files; without FILE all groups are checked.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Found words, and better ones.
INSTEAD = {
    r"lies|lay|laid|lying": "is placed, has the layout",
    r"the data say|only the data": "data-dependent",
    r"anew": "again",
    r"told": "given, named, reported",
    r"lest": "so that ... not",
    r"cut|cuts|cutting": "shard, sharded, split",
    r"pieces?": "shard, block",
}
PATTERNS = [
    (re.compile(rf"\b(?:{words})\b", re.IGNORECASE), better) for words, better in INSTEAD.items()
]
# names of code are exempt
CODE = re.compile(r"`[^`]*`")
EXEMPT = {"docs/glossary.md", "tools/words.py", "docs/op_coverage.md"}

WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
EXAMPLE = re.compile(r">>>.*?(?=\n\s*\n|\Z)", re.DOTALL)
VAGUE = {
    "what": re.compile(r"\bwhat\b(?! is more)", re.IGNORECASE),
    "those": re.compile(r"\bthose\b", re.IGNORECASE),
    "fronted Of": re.compile(r"(?:^|[.:;?!]\s+|\n\s*\n\s*)Of\b(?! course)"),
    "is no": re.compile(r"\b(?:is|are|was|were|be|has|have|had) (?:no|none)\b", re.IGNORECASE),
    "opening": re.compile(r"^(?:What|Whether|Who|Whose|Until|From|Of)\b"),
}


@dataclass(frozen=True, slots=True)
class Group:
    """Files with common ceilings.

    Attributes:
        name: for the report.
        paths: regular expression of paths; a file belongs to the first group whose expression fits.
        ceilings: the most vague words per 1,000 words, in the order of `VAGUE`.
    """

    name: str
    paths: str
    ceilings: tuple[float, ...]


# Groups above the ceilings of sources have the rates that they have now, so that they cannot grow.
GROUPS = (
    Group("sources", r"packages/[^/]+/src/.*\.py", (0.7, 0.4, 0, 1.7, 0)),
    Group("decisions", r"docs/adr/.*\.md", (0.8, 0.8, 0, 0.8, 0)),
    Group("changelogs", r"packages/[^/]+/CHANGELOG\.md", (0.8, 0.8, 0, 0.8, 0)),
    Group("pages", r".*\.md", (0.8, 0.6, 0, 0.7, 0)),
    Group(
        "tools, benchmarks, examples",
        r"(?:benchmarks|docs|examples|tools|\.ci)/.*\.py|[^/]+\.py",
        (0.6, 0.4, 0, 1.0, 0),
    ),
    Group("tests", r".*\.py", (7.8, 1.5, 0.5, 1.5, 2.8)),
)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers and texts of prose: lines of a page, strings and comments of a module."""
    if path.suffix == ".md":
        yield from _outside_blocks(path.read_text())
        return
    for token in _strings_and_comments(path):
        for offset, line in enumerate(token.string.splitlines()):
            yield token.start[0] + offset, line


# A module is read for words and again for rates; its tokens take most of the time.
@cache
def _strings_and_comments(path: Path) -> tuple[tokenize.TokenInfo, ...]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return tuple(token for token in tokens if token.type in (tokenize.STRING, tokenize.COMMENT))


def _outside_blocks(text: str) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced:
            yield number, line


def findings(path: Path) -> Iterator[str]:
    """One line for each word that should be another."""
    for number, line in prose(path):
        plain = CODE.sub("", line)
        for pattern, better in PATTERNS:
            for match in pattern.finditer(plain):
                yield f"{path.relative_to(ROOT)}:{number}: {match.group()!r}: write {better}"


def texts(path: Path) -> Iterator[tuple[bool, str]]:
    """Yield docstrings, comments, messages and paragraphs; True for docstrings."""
    source = path.read_text()
    if path.suffix == ".md":
        lines = "\n".join(line for _, line in _outside_blocks(source))
        yield from ((False, paragraph) for paragraph in re.split(r"\n\s*\n", lines))
        return
    yield from ((False, comment) for comment in _comments(path))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield True, node.value.value.strip()
        elif isinstance(node, ast.Raise | ast.Call) and _is_message(node):
            yield from ((False, text) for text in _literals(node))


def _comments(path: Path) -> Iterator[str]:
    """Yield comments; consecutive lines are one comment."""
    lines: list[str] = []
    last = 0
    for token in _strings_and_comments(path):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != last + 1:
            yield " ".join(lines)
            lines = []
        lines.append(token.string.lstrip("# "))
        last = token.start[0]
    yield " ".join(lines)


def _is_message(node: ast.Raise | ast.Call) -> bool:
    """Tell whether the strings in a statement or call are shown to users."""
    if isinstance(node, ast.Raise):
        return True
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in {"warn", "warning", "info", "print"}


def _literals(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def rates(paths: Iterable[Path]) -> dict[str, float]:
    """Return the number of each kind of vague word per 1,000 words of the files."""
    words = 0
    counts = Counter[str]()
    for path in paths:
        for is_docstring, text in texts(path):
            plain = CODE.sub("", EXAMPLE.sub("", text))
            words += len(WORD.findall(plain))
            for kind, pattern in VAGUE.items():
                if kind != "opening" or is_docstring:
                    counts[kind] += len(pattern.findall(plain))
    return {kind: 1000 * counts[kind] / max(words, 1) for kind in VAGUE}


def excesses(paths: Iterable[Path]) -> Iterator[str]:
    """Yield one line for each kind of vague word that a group of files has too often."""
    members: dict[str, list[Path]] = {group.name: [] for group in GROUPS}
    for path in paths:
        relative = path.relative_to(ROOT).as_posix()
        group = next(one for one in GROUPS if re.fullmatch(one.paths, relative))
        members[group.name].append(path)
    for group in GROUPS:
        found = rates(members[group.name])
        for (kind, rate), ceiling in zip(found.items(), group.ceilings, strict=True):
            if round(rate, 2) > ceiling:
                yield (
                    f"{group.name}: {rate:.2f} {kind!r} per 1,000 words, at most {ceiling}: "
                    "rewrite sentences with their nouns"
                )


def main() -> int:
    """Print the findings in the files of git, or in the named files; fail if there are any."""
    named = sys.argv[1:] or subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    paths = [ROOT / name for name in named if name and name not in EXEMPT]
    paths = [path for path in paths if path.exists()]
    found = [line for path in paths for line in findings(path)]
    if not sys.argv[1:]:
        found.extend(excesses(paths))
    print("\n".join(found) if found else f"{len(paths)} files, every word in its place")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
