"""Covers: pool.py."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import all_reduce, comm_over
from shoal_mesh.errors import RankError
from shoal_mesh.testing import RankPool, on_ranks, rank_pool


@on_ranks(4)
def test_a_body_runs_on_every_rank_with_a_group() -> None:
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == 4


@pytest.mark.parametrize("x", [1, 2])
@on_ranks(2)
def test_arguments_and_fixtures_are_sent_by_value(x: int, tmp_path: Path) -> None:
    assert x in {1, 2}
    assert tmp_path.exists()


def _rank_and_seed(add: int) -> tuple[int, float]:
    return dist.get_rank() + add, float(torch.rand(()))


def _one_fails_the_others_wait() -> None:
    print("waiting")
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def _one_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(100)


def _one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_a_failure_shows_every_rank_and_the_pool_heals() -> None:
    with pytest.raises(RankError, match="rank one is unhappy") as caught:
        rank_pool(2).run(_one_fails_the_others_wait)
    assert caught.value.failures[1] == "rank one is unhappy"
    assert isinstance(caught.value.__cause__, ValueError | RuntimeError)
    assert "waiting" in str(caught.value)
    assert rank_pool(2).run(dist.get_rank) == [0, 1]


def test_a_hang_says_who_and_where() -> None:
    with pytest.raises(RankError, match="rank 1 had not returned in") as caught:
        rank_pool(2).run(_one_sleeps, timeout=0.5)
    assert caught.value.hung == (1,)
    assert "_one_sleeps" in str(caught.value)
    assert rank_pool(2).run(dist.get_rank) == [0, 1]


def test_a_dead_rank_is_a_failure() -> None:
    with pytest.raises(RankError, match="the process of rank 1"):
        rank_pool(2).run(_one_dies)


def _one_returns_the_others_wait(op: str) -> None:
    comm = comm_over((0, 1))
    for _ in range(1 + dist.get_rank()):  # of the first one both are part
        all_reduce(torch.ones(2, dtype=torch.int32), comm, op)


@pytest.mark.parametrize("op", ["sum", "bxor"])  # through shared memory, by gloo
def test_a_rank_that_others_wait_for_after_it_has_returned_is_named(op: str) -> None:
    with pytest.raises(RankError, match=r"rank 0 .* has returned"):
        rank_pool(2).run(_one_returns_the_others_wait, op, timeout=None)
    assert rank_pool(2).run(dist.get_rank) == [0, 1]


def test_what_cannot_be_sent_is_refused_here() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        rank_pool(2).run(_rank_and_seed, (i for i in range(2)))
    with pytest.raises(ValueError, match="at least one rank"):
        RankPool(0)
    assert str(RankPool(True).size) == "1"


def test_a_script_that_starts_ranks_when_imported_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        f"from {rank_pool.__module__} import rank_pool\n\ndef job():\n    return "
        "1\n\nprint(rank_pool(2).run(job))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert ended.returncode == 1
    assert "__name__ == '__main__'" in ended.stderr


def _usage() -> tuple[int, int, int, int, int]:
    """MiB, descriptors and threads of this process.

    It also has what is in the folders for files that are not kept.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    folders = [
        len(os.listdir(folder))
        for folder in ("/proc/self/fd", "/proc/self/task", gettempdir(), "/dev/shm")
    ]
    mebibytes = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return (mebibytes, *folders)  # type: ignore[return-value]  # four of them


def _one() -> int:
    return 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_pools_leave_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []
    for _ in range(1000):
        with RankPool(1) as pool:
            assert pool.run(_one) == [1]
        seen.append(_usage())
    assert seen[-1][0] <= seen[20][0] + 2 and seen[-1][1:4] == seen[20][1:4], (seen[20], seen[-1])
