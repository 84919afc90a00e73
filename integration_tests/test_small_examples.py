"""Covers: examples/*.py: each program prints what examples/README.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
from integration_tests.processes import two_at_a_time

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
SHOWN = re.compile(r"^\$ python examples/(\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_program(name: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.fixture(scope="module")
def printed() -> dict[str, Future[str]]:
    return two_at_a_time(run_program, [(name,) for name in PROGRAMS])


def test_the_page_shows_every_program() -> None:
    shown = SHOWN.findall((EXAMPLES / "README.md").read_text())
    assert sorted(name for name, _ in shown) == PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_the_shown_output(name: str, printed: dict[str, Future[str]]) -> None:
    shown = dict(SHOWN.findall((EXAMPLES / "README.md").read_text()))[name]
    # "..." ends what the page shows of a longer output
    expected, *_ = shown.split("...\n")
    assert printed[name].result().startswith(expected)
