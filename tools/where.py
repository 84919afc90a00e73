"""Writes `where/` from first sentences of folders and modules: `python tools/where.py --check`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "where"

INTRODUCTION = """\
# Where does X live?

Every folder and module of a package with the first sentence of its docstring. Imports go down only:
`May import:` in a folder's docstring names the siblings that its modules may import, and
`nox -s lint` checks it. Private names of torch are used in `_torch` only. The module `internal` of
a package has the names for other packages of shoal.

These pages are generated: `python tools/where.py`.

```{toctree}
:maxdepth: 1

"""


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, without its final stop."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].split(".  ")[0].rstrip(".")


def modules(folder: Path) -> Iterator[Path]:
    """Return a folder's modules in alphabetical order, without the modules of every package."""
    for path in sorted(folder.glob("*.py")):
        if path.name not in ("__init__.py", "__about__.py", "__main__.py"):
            yield path


def page(source: Path) -> str:
    """The page of one package."""
    lines = [f"# {source.name}", "", f"{first_sentence(source / '__init__.py')}."]
    for folder in (source, *sorted(path.parent for path in source.rglob("*/__init__.py"))):
        lines.append("")
        if folder != source:
            lines += [
                f"## {folder.relative_to(source)}/",
                "",
                f"{first_sentence(folder / '__init__.py')}.",
                "",
            ]
        lines += [f"- `{path.stem}`: {first_sentence(path)}" for path in modules(folder)]
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """All pages with their text."""
    sources = sorted(ROOT.glob("packages/*/src/shoal_*"))
    found = {PAGES / f"{source.name}.md": page(source) for source in sources}
    return {
        PAGES / "index.md": INTRODUCTION + "\n".join(path.stem for path in found) + "\n```\n",
        **found,
    }


def main() -> int:
    """Write the pages, or with `--check` report pages that are out of date."""
    wanted = pages()
    if "--check" not in sys.argv[1:]:
        PAGES.mkdir(exist_ok=True)
        for path, text in wanted.items():
            path.write_text(text)
    elif {path: path.read_text() for path in PAGES.glob("*.md")} != wanted:
        print("docs/where/ is out of date: run `python tools/where.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
