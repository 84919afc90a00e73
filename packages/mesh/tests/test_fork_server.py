"""Covers: pool.py: the process that forks ranks, and the end of ranks with their parent."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shoal_mesh import testing
from shoal_mesh.local_ranks import worker
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
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=env
    ) as parent:
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
    return {"pytest", "torch._dynamo", "torch._inductor.pattern_matcher"} <= sys.modules.keys()


def test_a_module_that_the_program_has_made_itself_keeps_no_rank_from_starting() -> None:
    served = "serve_forks(['transformers.models.of_the_program'])"
    code = f"from {worker.__name__} import serve_forks; {served}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, env=env, check=False
    )
    assert server.returncode == 0, "it ends when there is nothing more to fork"


def test_collections_in_a_rank_pass_over_what_was_imported_before_it() -> None:
    """Half a million objects, for which a collection takes a third of a second.

    The modules of shoal are among them.
    """
    for walked, frozen, walks_shoal in rank_pool(2).run(_tracked):
        assert walked * 4 < frozen, f"{walked} objects are walked, {frozen} are not"
        assert not walks_shoal


def _tracked() -> tuple[int, int, bool]:
    walked = gc.get_objects()
    return len(walked), gc.get_freeze_count(), any(value is vars(testing) for value in walked)


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_function_of_a_module_is_called_before_ranks_are_forked(tmp_path: Path) -> None:
    (tmp_path / "module_of_test.py").write_text("def prepare(): print('prepared')")
    names = ["module_of_test:prepare", "not_installed:prepare"]
    code = f"from {worker.__name__} import serve_forks; serve_forks({names})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", code]
    server = subprocess.run(
        command, stdin=subprocess.DEVNULL, env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout == "prepared\n"
