"""A script that launches ranks, and the processes that run it and others."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["SCRIPT", "run_script", "two_at_a_time"]


def two_at_a_time(
    start: Callable[..., str], calls: Mapping[str, tuple[Any, ...]]
) -> dict[str, Future[str]]:
    """What processes that need nothing of each other print.

    It is by name of the call that starts each and waits for it.
    """
    with ThreadPoolExecutor(2) as threads:
        return {name: threads.submit(start, *args) for name, args in calls.items()}


def run_script(tmp_path: Path, code: str, *command: str) -> str:
    """What a script prints, started by a command in a process of its own.

    The command `-` reads it from stdin.
    """
    script = tmp_path / "script.py"
    tmp_path.mkdir(exist_ok=True)
    script.write_text(textwrap.dedent(code))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    stdin = command == ("-",)
    source = script.read_text() if stdin else None
    done = subprocess.run(
        [sys.executable, *command, *([] if stdin else [str(script)])],
        input=source, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
    import torch
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
"""
