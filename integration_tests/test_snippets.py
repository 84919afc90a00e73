"""Covers: README.md, packages/*/README.md and docs/**/*.md: every Python block runs as written.

The blocks of a page run in order, as one program. A page that says `<!-- ranks: 4 -->` runs on four gloo ranks.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal_mesh.testing import rank_pool

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
RANKS = re.compile(r"^<!-- ranks: (\d+) -->$", re.MULTILINE)


def pages() -> list[Path]:
    found = [ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(path for path in found if "_build" not in path.parts and BLOCK.search(path.read_text()))


def program(page: Path) -> str:
    """The blocks of a page in place, everything else blank, so that a traceback shows the page's own lines."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        lines[first : first + block[1].count("\n")] = block[1].splitlines()
    return "\n".join(lines)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = program(page)
    ranks = RANKS.search(page.read_text())
    if ranks is None:
        exec(compile(code, str(page), "exec"), {"__name__": "__page__"})
    else:
        rank_pool(int(ranks[1])).run(exec, code, {"__name__": "__page__"}, timeout=200)


def test_there_are_pages_with_blocks() -> None:
    assert {"README.md", "redistribute.md", "placements.md"} <= {page.name for page in pages()}
