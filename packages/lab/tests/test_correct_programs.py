"""Correct programs raise no alarm.

Covers: certify.py, observe/observer.py, analysis/verdict.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from correct_programs import PROGRAMS
from shoal_lab import certify
from shoal_lab.report import describe_mesh


@pytest.mark.parametrize(
    ("program", "mesh"),
    PROGRAMS,
    ids=[f"{program.__name__} {describe_mesh(mesh)}" for program, mesh in PROGRAMS],
)
def test_no_alarm(program: Callable[[dict[str, int]], Any], mesh: dict[str, int]) -> None:
    report = certify(program, meshes=[mesh])
    assert report.passed, str(report)
    assert report.results[0].compared >= 4
    assert not report.smallest
