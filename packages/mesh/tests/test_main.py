"""`python -m shoal_mesh` is the command line, and ends with the status of its command.

Covers: __main__.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import shoal_mesh


def test_a_command_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", shoal_mesh.__name__, "postmortem", str(tmp_path)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == f"no files of ranks found in {tmp_path}\n"
