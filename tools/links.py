"""Checks a built site: every page has a title and contents, every link and image leads somewhere.

`python tools/links.py docs/_build/html` exits with the number of faults. Addresses of other sites
are not asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links, anchors and title of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.references: set[str] = set()
        self.anchors = {""}
        self.title, self.headings, self._in_title = "", 0, False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := found.get(name)))
        self.references.update(value for name in ("href", "src") if (value := found.get(name)))
        self._in_title = tag == "title"
        self.headings += tag == "h1"

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data.strip()
            self._in_title = False


def faults(site: Path) -> list[str]:
    """One line for each fault."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: no page"]
    for path, page in pages.items():
        where = path.relative_to(site)
        if not page.title:
            found.append(f"{where}: no title")
        if not page.headings and path.name not in (
            "genindex.html",
            "py-modindex.html",
            "search.html",
        ):
            found.append(f"{where}: no heading")
        for reference in sorted(page.references):
            parts = urlsplit(reference)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                found.append(f"{where}: {reference} is not there")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{where}: {reference} has no such anchor")
    return found


def report(faults: Callable[[Path], list[str]]) -> int:
    """Print the faults of the site that the command line names; how many there are, at most 100."""
    found = faults(Path(sys.argv[1]).resolve())
    sys.stdout.writelines(f"{line}\n" for line in found)
    return min(len(found), 100)


if __name__ == "__main__":
    sys.exit(report(faults))
