"""Covers: README.md, packages/*/README.md and docs/**/*.md: every Python block runs as written.

The blocks of a page run in order, as one program. A page that says `<!-- ranks: 4 -->` runs on four
gloo ranks. A ```text block right after a Python block is what it prints on the first rank. Other
ranks may print nothing, or other values with the same sequence of True and False.

Figures of the README's table of evidence are those of the pages that the table names.

Guides in docs/how-to have one pattern: a title of at most six words, the purpose, a program with
its output, variations, limits, keywords. Their blocks print results instead of asserting them.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal_mesh.testing import rank_pool

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
RANKS = re.compile(r"^<!-- ranks: (\d+) -->$", re.MULTILINE)
VERDICT = re.compile(r"\b(?:True|False)\b")
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
ASSERTION = re.compile(r"^\s*(?:assert\b|torch\.testing\.assert_)", re.MULTILINE)
GUIDES = sorted((ROOT / "docs" / "how-to").glob("*.md"))


def pages() -> list[Path]:
    found = [ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(
        path for path in found if "_build" not in path.parts and BLOCK.search(path.read_text())
    )


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """The blocks of a page and what each prints.

    Blank lines stand above, so that a traceback shows the page's own lines.
    """
    text = page.read_text()
    return [
        ("\n" * text.count("\n", 0, block.start(1)) + block[1], block[2])
        for block in BLOCK.finditer(text)
    ]


def run(page: str, program: list[tuple[str, str | None]]) -> None:
    """Run the blocks in one namespace, and compare what they print."""
    namespace = {"__name__": "__main__"}
    for code, expected in program:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, page, "exec"), namespace)
        if expected is None:
            continue
        if not dist.is_initialized() or dist.get_rank() == 0:
            lines = [line.rstrip() for line in printed.getvalue().splitlines() if line.strip()]
            assert lines == [line.rstrip() for line in expected.splitlines() if line.strip()], (
                "\n".join(lines)
            )
        elif printed.getvalue().strip():
            said, shown = VERDICT.findall(printed.getvalue()), VERDICT.findall(expected)
            assert said == shown, printed.getvalue()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = RANKS.search(page.read_text())
    if ranks is None:
        run(str(page), blocks(page))
    else:
        rank_pool(int(ranks[1])).run(run, str(page), blocks(page), timeout=200)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_guides_have_one_pattern(guide: Path) -> None:
    text = guide.read_text()
    prose = FENCED.sub("```", text)
    title = prose.splitlines()[0].removeprefix("# ")
    assert len(title.split()) <= 6, title
    headings = [line.removeprefix("## ") for line in prose.splitlines() if line.startswith("## ")]
    assert headings == ["Program", "Variations", "Limits"]
    purpose, program, _, limits = re.split(r"^## .*$", prose, flags=re.MULTILINE)
    assert len(RANKS.sub("", purpose).split()) > 15, "a guide begins with its purpose"
    assert "```" not in purpose, "the program is in its own section"
    assert program.count("```") >= 2, "a program and its output"
    assert "*Keywords: " in limits, "a guide ends with keywords"
    assert not [code for code, _ in blocks(guide) if ASSERTION.search(code)]


def test_figures_of_the_readme_are_those_of_the_pages_with_results() -> None:
    evidence = (ROOT / "README.md").read_text().partition("## Evidence")[2].partition("## ")[0]
    checked = 0
    for row in evidence.splitlines():
        page = re.search(r"\((docs/[\w/-]+\.md)\)", row)
        if page is None:
            continue
        results = (ROOT / page[1]).read_text().replace(",", "")
        figures = re.findall(r"\d[\d,.]{2,}", "|".join(row.split("|")[2:5]))
        missing = [figure for figure in figures if figure.replace(",", "") not in results]
        assert not missing, f"{page[1]} does not have {missing}"
        checked += len(figures)
    assert checked >= 12


def test_there_are_pages_with_blocks() -> None:
    assert {"README.md", "redistribute.md", "placements.md"} <= {page.name for page in pages()}
