"""Covers: processes.py: the states of processes, as the kernel shows them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from shoal_mesh.watch.processes import machine, state_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states are read in /proc")


def wait_for(state: str, pid: int) -> bool:
    deadline = time.monotonic() + 20
    while state_of(pid) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(pid) == state


def test_a_child_runs_is_stopped_and_has_ended_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert state_of(child.pid) == "running"
        os.kill(child.pid, signal.SIGSTOP)
        assert wait_for("stopped", child.pid)
        os.kill(child.pid, signal.SIGKILL)
        assert wait_for("ended", child.pid)
    finally:
        child.kill()
        child.wait()
    assert state_of(child.pid) == "ended"


def test_the_machine_has_a_number_that_stays() -> None:
    assert machine() == machine() > 0
