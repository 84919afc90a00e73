"""Covers: drop_in/: shoal returns the results of torch's stack, or docs/differences.md says why."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from integration_tests.case_runner import run_cases
from integration_tests.drop_in.signatures import differences
from integration_tests.drop_in.snippets import FOLDER, compare, snippets

from shoal_mesh.testing import fake_world

PAGE = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()
AREAS = sorted(path.stem for path in FOLDER.glob("*.txt"))
# differences of signatures on torch 2.15, which has the most names: fewer are welcome
MOST = 47


def test_every_difference_of_signatures_has_a_row() -> None:
    with fake_world(4):
        found = differences()
    assert [line for row, line in found if f'<a id="{row}">' not in PAGE] == []
    assert len(found) <= MOST, "a name or argument of torch's that was here is gone"


def test_every_difference_has_a_row() -> None:
    rows = {snippet.row for snippet in snippets() if snippet.row}
    anchors = re.findall(r'<a id="([^"]+)">', PAGE)
    assert len(anchors) == len(set(anchors))
    assert rows <= set(anchors)
    assert {anchor for anchor in anchors if anchor.startswith("d-")} <= rows | {
        row for row, _ in _signatures()
    }


def test_every_row_can_be_linked_to() -> None:
    lines = PAGE.splitlines()
    rows = [
        line
        for line, below in itertools.pairwise(lines)
        if line.startswith("| ") and not below.startswith("|--")
    ]
    assert rows and all(row.startswith('| <a id="') for row in rows)


def _signatures() -> list[tuple[str, str]]:
    with fake_world(4):
        return differences()


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="docs/differences.md is about torch 2.13"
)
@pytest.mark.parametrize("area", AREAS)
def test_answers_differ_where_a_row_says_so(area: str) -> None:
    cases = snippets(area)
    verdicts = run_cases(compare, cases, 120.0)
    wrong = [
        f"{case.code}\n    {verdict or f'no longer differs; {case.row} is not needed'}"
        for case, verdict in zip(cases, verdicts, strict=True)
        if bool(verdict) != bool(case.row)
    ]
    assert not wrong, "\n".join(wrong)
