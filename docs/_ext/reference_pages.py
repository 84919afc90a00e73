"""Sphinx extension that gives each public class and function a page.

Each package gets a table of its names.

The pages of packages, `reference/shoal_*.md`, list names as `autoclass` and `autofunction`
directives. Before Sphinx reads them, this extension writes a page for each name into
`reference/shoal_*/`, which git ignores, and replaces the directives by a table of names and
summaries. The pages of names are in reStructuredText: MyST pickles 1.5 MB with each page that has
an `eval-rst` block. Errors, and the members of modules that a page documents as a whole
(`automodule`), stay on the page of the package.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

PAGES = "reference/shoal_"
BLOCK = re.compile(r"^```\{eval-rst\}\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
SPACE = re.compile(r"^\.\. (?:current)?module:: ([\w.]+)$", re.MULTILINE)
ENTRY = re.compile(r"^\.\. auto(class|function):: ([\w.]+)\n((?:   :.*\n)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Entry:
    """A class or function with a page of its own.

    Attributes:
        package: name of the folder of the page.
        space: namespace from which users import the name.
        name: without the namespace.
        kind: "class" or "function".
        options: lines of the directive's options.
    """

    package: str
    space: str
    name: str
    kind: str
    options: str

    @property
    def page(self) -> str:
        """Name of the page's file; a class and a function may differ in case alone, files not."""
        return f"{self.name}-function" if self.is_lower_case_of_a_class() else self.name

    def is_lower_case_of_a_class(self) -> bool:
        """Tell whether a function has the name of a class of its namespace in lower case."""
        names = {name.lower() for name in dir(import_module(self.space)) if not name.islower()}
        return self.kind == "function" and self.name in names

    @property
    def text(self) -> str:
        """Source of the page."""
        title = f"``{self.name}``"
        return (
            f":orphan:\n\n{title}\n{'=' * len(title)}\n\n"
            f":doc:`{self.package} <../{self.package}>`\n\n"
            f".. currentmodule:: {self.space}\n\n"
            f".. auto{self.kind}:: {self.name}\n{self.options}"
        )

    @property
    def row(self) -> str:
        """Row of the package's table."""
        link = f"[`{self.name}`]({self.package}/{self.page}.rst)"
        return f"| {link} | {summary(self.space, self.name)} |"


def summary(space: str, name: str) -> str:
    """Return the first sentence of a docstring as text of a table's cell."""
    text = inspect.getdoc(getattr(import_module(space), name)) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].rstrip(".")
    return sentence.replace("``", "`").replace("|", "\\|")


def entries(package: str, block: str) -> Iterator[Entry]:
    """Yield the classes and functions that a block of directives lists under a public namespace."""
    found = SPACE.search(block)
    space = found[1] if found else package
    if space.endswith(".internal"):
        return
    for kind, name, options in ENTRY.findall(block):
        if "." not in name:
            yield Entry(package, space, name, kind, options)


def with_tables(package: str, text: str) -> str:
    """Replace directives of a package's page by tables that link to the pages of names."""

    def table(match: re.Match[str]) -> str:
        listed = [*entries(package, match[1])]
        if not listed:
            return match[0]
        rows = "\n".join(["| name | summary |", "|---|---|", *(entry.row for entry in listed)])
        names = {entry.name for entry in listed}
        rest = ENTRY.sub(lambda one: "" if one[2] in names else one[0], match[1])
        has_directives = re.search(r"^\.\. (?!currentmodule)", rest, re.MULTILINE)
        kept = f"\n```{{eval-rst}}\n{rest}```\n" if has_directives else ""
        return f"{rows}\n{kept}"

    return BLOCK.sub(table, text)


def write_pages(app: Any) -> None:
    """Write the page of each name if its text has changed; remove pages of names that are gone."""
    for page in sorted(Path(app.srcdir).glob(f"{PAGES}*.md")):
        folder = page.with_suffix("")
        blocks = BLOCK.findall(page.read_text())
        texts = {one.page: one.text for block in blocks for one in entries(page.stem, block)}
        for name, text in texts.items():
            _write(folder / f"{name}.rst", text)
        for old in folder.glob("*.rst"):
            if old.stem not in texts:
                old.unlink()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def replace_directives(_app: object, page: str, source: list[str]) -> None:
    """Show the table of names on the page of a package."""
    package = page.removeprefix("reference/")
    if page.startswith(PAGES) and "/" not in package:
        source[0] = with_tables(package, source[0])


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", replace_directives)
    return {"parallel_read_safe": True}
