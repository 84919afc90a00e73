"""Finds words in prose and comments that `glossary.md` has a better one for: `python tools/words.py [FILE ...]`."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

# What is found, and what is written instead.
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
# names of code in prose may be what they are
CODE = re.compile(r"`[^`]*`")
EXEMPT = {"docs/glossary.md", "tools/words.py", "docs/op_coverage.md"}


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts of what is written for people: a page's lines, a module's strings and comments."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from _outside_blocks(text)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def _outside_blocks(text: str) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced:
            yield number, line


def findings(path: Path) -> Iterator[str]:
    """One line for each word that should be another."""
    for number, line in prose(path):
        for pattern, better in PATTERNS:
            for match in pattern.finditer(CODE.sub("", line)):
                yield f"{path.relative_to(ROOT)}:{number}: {match.group()!r}: write {better}"


def main() -> int:
    """Print what was found in the files that git knows, or in those named; fail if there is any."""
    named = sys.argv[1:] or subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    paths = [ROOT / name for name in named if name and name not in EXEMPT]
    found = [line for path in paths if path.exists() for line in findings(path)]
    print("\n".join(found) if found else f"{len(paths)} files, every word in its place")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
