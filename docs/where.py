"""Writes `where.md` from the first sentences of folders and modules: `python docs/where.py [--check]`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "where.md"
STACK = ("mesh", "dtensor", "tp-styles", "shard-api")  # bottom to top

INTRODUCTION = """\
# Where does X live?

Every folder and module by the first sentence of its docstring. Imports go down only: `shoal_tp_styles` and
`shoal_shard_api` stand on `shoal_dtensor`, which stands on `shoal_mesh`; inside a package the order is in the root
`pyproject.toml`, under `tool.importlinter`, and `nox -s layers` checks it. Private names of torch are used in `_torch`
and nowhere else.

This page is generated: `python docs/where.py`.
"""


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, without its final stop."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].split(".  ")[0].rstrip(".")


def modules(folder: Path) -> Iterator[Path]:
    """The modules of a folder in alphabetical order, without those that every package has."""
    for path in sorted(folder.glob("*.py")):
        if path.name not in ("__init__.py", "__about__.py", "__main__.py"):
            yield path


def section(source: Path) -> Iterator[str]:
    """The lines of one package."""
    yield f"## {source.name}"
    yield ""
    yield f"{first_sentence(source / '__init__.py')}."
    for folder in (source, *sorted(path.parent for path in source.rglob("*/__init__.py"))):
        yield ""
        if folder != source:
            yield f"### {folder.relative_to(source)}/"
            yield ""
            yield f"{first_sentence(folder / '__init__.py')}."
            yield ""
        for path in modules(folder):
            yield f"- `{path.stem}`: {first_sentence(path)}"


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for package in STACK:
        (source,) = (ROOT / "packages" / package / "src").iterdir()
        lines += [*section(source), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page, or with `--check` say whether it is what it should be."""
    wanted = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted)
    elif PAGE.read_text() != wanted:
        print("docs/where.md is out of date: run `python docs/where.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
