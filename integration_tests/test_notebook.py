"""Covers: docs/notebook.ipynb: every cell runs with the page's output, but times and pictures.

`python -m integration_tests.test_notebook` runs it and keeps what its cells show.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

PAGE = Path(__file__).resolve().parent.parent / "docs" / "notebook.ipynb"
# pictures of times and memory differ from run to run
FREE = ("image/png",)


def executed(folder: Path) -> Any:
    notebook = nbformat.read(PAGE, 4)  # type: ignore[no-untyped-call]  # it has no types
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def shown(notebook: Any) -> list[str]:
    """What each cell shows, pictures by their kind only."""
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    texts = []
    for output in outputs:
        data = {kind: "" if kind in FREE else text for kind, text in output.get("data", {}).items()}
        texts.append(json.dumps([output.get("text", ""), data], sort_keys=True))
    return texts


def test_the_notebook_runs_and_shows_what_the_page_shows(tmp_path: Path) -> None:
    notebook = nbformat.read(PAGE, 4)  # type: ignore[no-untyped-call]  # it has no types
    assert shown(executed(tmp_path)) == shown(notebook)


if __name__ == "__main__":
    nbformat.write(executed(Path.cwd()), PAGE)  # type: ignore[no-untyped-call]  # it has no types
