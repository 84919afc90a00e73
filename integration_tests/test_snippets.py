"""Covers: README.md, packages/*/README.md and docs/**/*.md: every Python block runs as written.

The blocks of a page run in order, as one program. A page that says `<!-- ranks: 4 -->` runs on four
gloo ranks. A
```text block right after a Python block is what it prints, on the first rank.
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


def pages() -> list[Path]:
    found = [ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(
        path for path in found if "_build" not in path.parts and BLOCK.search(path.read_text())
    )


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """The blocks of a page and what each prints; blank lines above, so that a traceback shows the page's own lines."""
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
        if expected is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            said = [line.rstrip() for line in printed.getvalue().splitlines() if line.strip()]
            assert said == [line.rstrip() for line in expected.splitlines() if line.strip()], (
                "\n".join(said)
            )


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


def test_there_are_pages_with_blocks() -> None:
    assert {"README.md", "redistribute.md", "placements.md"} <= {page.name for page in pages()}
