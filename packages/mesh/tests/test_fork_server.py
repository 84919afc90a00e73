"""Covers: pool.py: what ranks are forked from, and that they end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shoal_mesh.local_ranks.pool import ForkServer
from shoal_mesh.testing import rank_pool

PARENT = """
import os, sys, time
from shoal_mesh.testing import RankPool
pool = RankPool(2)
print(*pool.run(os.getpid), flush=True)
time.sleep(60)
"""


def test_ranks_end_with_their_parent() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def test_the_fork_server_has_one_thread_whatever_it_has_imported() -> None:
    """A fork while another thread holds a lock would have that lock for ever."""
    imported = rank_pool(2).run(_imported)
    assert imported == [True, True]
    assert len(os.listdir(f"/proc/{ForkServer.get().process.pid}/task")) == 1


def _imported() -> bool:
    return {"pytest", "torch._dynamo"} <= sys.modules.keys()


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
