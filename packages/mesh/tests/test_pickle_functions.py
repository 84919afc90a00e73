"""Covers: pickle_functions.py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import cast

from shoal_mesh.testing import rank_pool


def _run(tmp_path: Path, code: str, *command: str, stdin: bool = False) -> str:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    source = script.read_text() if stdin else None
    done = subprocess.run(
        [sys.executable, *command, *([] if stdin else [str(script)])],
        input=source, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
    import torch, torch.distributed as dist
    from shoal_mesh import all_reduce, init_device_mesh, launch
    STEP = 10

    def add(x):
        return x + STEP

    def main(x):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        print(f"printed on {mesh.get_rank()}\\n", end="", flush=True)
        return add(all_reduce(torch.tensor(x), (mesh, "dp")).item())

    if __name__ == "__main__":
        print(launch(main, 2, 5))
        dist.is_initialized() and dist.destroy_process_group()
"""


def test_from_a_notebook_the_function_travels_as_code(tmp_path: Path) -> None:
    assert "[20, 20]" in _run(tmp_path, SCRIPT, "-", stdin=True)


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
