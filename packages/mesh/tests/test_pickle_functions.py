"""Covers: pickle_functions.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from shoal_mesh.testing import rank_pool
from started_scripts import SCRIPT, run_script


def test_from_a_notebook_the_function_travels_as_code(tmp_path: Path) -> None:
    assert "[20, 20]" in run_script(tmp_path, SCRIPT, "-", stdin=True)


def test_inner_functions_and_lambdas_travel_as_code() -> None:
    factor = 7

    def times(x: int) -> int:
        return x * factor

    assert rank_pool(2).run(lambda: times(2)) == [14, 14]


def test_functions_that_exec_defines_travel_as_code() -> None:
    scope = {"__name__": __name__, "factor": 3}
    exec("def times(x): return x * factor", scope)
    assert rank_pool(2).run(cast("Callable[[int], int]", scope["times"]), 2) == [6, 6]


def test_an_inner_function_may_call_itself() -> None:
    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n else 1

    assert rank_pool(2).run(factorial, 4) == [24, 24]
