"""The rank that an error names if a collective of gloo cannot be completed.

Covers: backend_work.py.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import Comm, PeerError, all_gather, all_reduce, comm_over, launch, restart_world
from shoal_mesh.errors import RankError
from shoal_mesh.shared_memory.channel import OPT_OUT
from shoal_mesh.testing import on_ranks
from shoal_mesh.watch import backend_work
from shoal_mesh.watch.processes import ProcessState

TIMEOUT = 2.0


def through_gloo() -> Comm:
    os.environ[OPT_OUT] = "0"
    try:
        restart_world(timeout=TIMEOUT)
        comm = comm_over(tuple(range(dist.get_world_size())))
        all_reduce(torch.ones(1), comm)
    finally:
        del os.environ[OPT_OUT]
    return comm


def fail(how: str, seen: str) -> None:
    comm = through_gloo()
    if dist.get_rank() == 1:
        if how != "away":
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        time.sleep(60)
    start = time.monotonic()
    with pytest.raises(PeerError) as caught:
        all_reduce(torch.ones(4), comm)
    Path(f"{seen}.{dist.get_rank()}").write_text(
        f"{time.monotonic() - start} {caught.value.ranks} {caught.value}"
    )


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("killed", "has ended"),
        pytest.param("stopped", "is stopped", marks=pytest.mark.slow),
        pytest.param("away", "has not reported", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_is_named(how: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1"):
        launch(fail, 3, how, str(tmp_path / "seen"), timeout=TIMEOUT + 6)
    for rank in (0, 2):
        seconds, _, said = (tmp_path / f"seen.{rank}").read_text().partition(" ")
        assert float(seconds) < TIMEOUT + 6
        assert said.startswith("(1,)") and "rank 1 " in said and text in said, said


@on_ranks(4)
def test_ranks_that_have_not_reported_are_named_together() -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_work, "lost_ranks", lambda *_: {})
        patch.setattr(backend_work, "_DEATH_SECONDS", 0.0)
        for started, text in (
            ({0, 1}, "ranks 2, 3 have not reported it: they are"),
            ({0, 1, 2}, "rank 3 has not"),
        ):
            patch.setattr(
                backend_work, "_roll_call", lambda *_, started=started: dict.fromkeys(started, 1)
            )
            assert backend_work._diagnose(group, [0, 1, 2, 3], 0)[0].startswith(text)


@on_ranks(2)
def test_a_rank_that_returned_because_another_is_lost_is_not_at_fault() -> None:
    group = dist.group.WORLD
    assert group is not None
    returned = backend_work.LostRank(7, ProcessState.RETURNED)
    stopped = backend_work.LostRank(8, ProcessState.STOPPED)
    assert (str(returned), str(stopped)) == (
        "(process 7) has returned",
        "(process 8) is stopped (SIGSTOP)",
    )
    with pytest.MonkeyPatch.context() as patch:
        for lost, ranks in (
            ({0: returned, 1: stopped}, (1,)),
            ({0: returned}, (0,)),
            ({0: stopped}, (0,)),
        ):
            patch.setattr(backend_work, "lost_ranks", lambda *_, lost=lost: lost)
            text, at_fault = backend_work._diagnose(group, [0, 1], 0)
            assert at_fault == ranks and all(str(state) in text for state in lost.values())


def start(different: int, seen: str) -> None:
    comm, rank = through_gloo(), dist.get_rank()
    with pytest.raises(PeerError) as caught:
        all_gather(torch.ones(4), comm) if rank == different else all_reduce(
            torch.ones(4), comm, "max"
        )
    Path(f"{seen}.{rank}").write_text(f"{caught.value.ranks} {caught.value}")


def test_a_rank_that_starts_another_collective_is_named(tmp_path: Path) -> None:
    launch(start, 3, 1, str(tmp_path / "seen"), timeout=TIMEOUT + 8)
    for rank in range(3):
        said = (tmp_path / f"seen.{rank}").read_text()
        assert said.startswith("(1,)") and "rank 1: all_gather of 4 x float32" in said, said
        assert "rank 2: all_reduce max of 4 x float32" in said


@pytest.mark.parametrize("large", [1, 0])
@on_ranks(3)
def test_large_messages_that_differ_are_not_sent(large: int) -> None:
    restart_world(timeout=3)
    comm, rank = comm_over((0, 1, 2)), dist.get_rank()
    # One is beyond what goes through shared memory in one turn; gloo aborts the process that gets
    # another length.
    lengths = {1: 1 << 20, 0: 1 << 10} if large else {1: 1 << 20, 0: (1 << 20) + 4}
    start = time.monotonic()
    with pytest.raises(
        PeerError, match=r"different collectives|started another collective"
    ) as caught:
        # a rank that is late may hear of it here
        all_reduce(torch.ones(1), comm)
        all_gather(torch.ones(lengths[int(rank == 1)]), comm, async_op=True).wait()
    assert time.monotonic() - start < 10
    assert "rank" in str(caught.value)
    restart_world(timeout=60)
    assert all_reduce(torch.ones(1), comm).item() == 3
