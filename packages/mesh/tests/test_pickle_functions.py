"""Covers: pickle_functions.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest

from shoal_mesh.errors import MeshTypeError
from shoal_mesh.testing import rank_pool
from started_scripts import SCRIPT, run_script, two_at_a_time

SEEN: list[int] = []


def _see(x: int) -> None:
    SEEN.append(x)


def _called(function: Callable[[int], int], x: int) -> int:
    return function(x)


CLASSES = """
    from dataclasses import dataclass
    import torch
    from shoal_mesh import launch
    SCALE = 3

    @dataclass
    class Pair:
        left: int
        right: int

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()

        def forward(self, x):
            return SCALE * x

    def step(pair):
        assert isinstance(pair, Pair)
        return Pair(Model()(pair.left), pair.right)

    found = launch(step, 2, Pair(2, 5))
    print(found, isinstance(found[0], Pair))
"""
DEFINITIONS = """
    from functools import cache
    from threading import Lock
    from shoal_mesh import launch
    LOCK = Lock()

    class Config:
        step = 1

    @cache
    def base():
        return 10

    def called(function, config):
        return function(config)

    if __name__ == "__main__":
        with LOCK:
            work = lambda config: base() + config.step * isinstance(config, Config)
            print(launch(called, 2, work, Config()))
        print(launch(lambda: [LOCK.locked(), type(Config()) is Config], 2))
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[str]]:
    """What each script prints; a notebook's cells come from stdin."""
    folder = tmp_path_factory.mktemp("scripts")
    started = {"function": (SCRIPT, "-"), "classes": (CLASSES, "-"), "definitions": (DEFINITIONS,)}
    return two_at_a_time(
        run_script, {name: (folder / name, *args) for name, args in started.items()}
    )


def test_from_a_notebook_the_function_travels_as_code(scripts: dict[str, Future[str]]) -> None:
    assert "[20, 20]" in scripts["function"].result()


def test_classes_of_a_notebook_travel_there_and_back(scripts: dict[str, Future[str]]) -> None:
    said = scripts["classes"].result()
    assert said == "[Pair(left=6, right=5), Pair(left=6, right=5)] True\n"


def test_ranks_run_the_script_for_what_it_defines(scripts: dict[str, Future[str]]) -> None:
    assert scripts["definitions"].result() == "[11, 11]\n[[False, True], [False, True]]\n"


def test_inner_functions_and_lambdas_travel_as_code() -> None:
    factor = 7

    def times(x: int, more: int = 0, *, plus: int = 0) -> int:
        return x * factor + more + plus

    assert rank_pool(2).run(lambda: times(2)) == [14, 14]
    assert rank_pool(2).run(_called, times, 3) == [21, 21]
    assert rank_pool(2).run(times, 1, plus=2) == [9, 9]


def test_an_inner_function_has_the_globals_of_its_file_on_the_rank() -> None:
    def seen() -> list[int]:
        _see(5)
        return SEEN

    assert rank_pool(2).run(seen) == [[5], [5]]
    assert SEEN == []


def test_functions_that_exec_defines_travel_as_code() -> None:
    scope = {"__name__": __name__, "factor": 3}
    exec("def times(x): return x * factor", scope)
    assert rank_pool(2).run(cast("Callable[[int], int]", scope["times"]), 2) == [6, 6]


def test_an_inner_function_may_call_itself() -> None:
    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n else 1

    assert rank_pool(2).run(factorial, 4) == [24, 24]


def test_what_is_no_function_or_holds_what_cannot_travel_is_refused() -> None:
    letters = (letter for letter in "ab")
    with pytest.raises(
        MeshTypeError, match=r"cannot send function .* cannot pickle 'generator' object"
    ):
        rank_pool(2).run(lambda: next(letters))
    with pytest.raises(MeshTypeError, match="is a bound method: pass a function"):
        rank_pool(2).run(Path("a").joinpath, "b")
    with pytest.raises(MeshTypeError, match="ranks run a function that they can import"):
        rank_pool(2).run(3)  # type: ignore[arg-type]  # the mistake
