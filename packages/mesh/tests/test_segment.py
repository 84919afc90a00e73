"""Covers: channel.py: the ranks that map one memory, and groups that do not use it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from shoal_mesh.shared_memory import channel
from shoal_mesh.shared_memory.channel import OPT_OUT, map_segment
from shoal_mesh.testing import on_ranks
from shoal_mesh.watch.deadlocks import board_of_process
from shoal_mesh.watch.processes import machine, processes_of


@on_ranks(3)
def test_all_ranks_map_the_same_memory_and_leave_nothing() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    # A process has one board for all of its groups, which stays.
    assert board_of_process() >= 0
    before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    shared = map_segment(group, 1 << 16)
    assert shared is not None
    assert processes_of(group)[rank] == (machine(), os.getpid())
    shared[100 + rank] = 7 + rank
    dist.barrier()
    assert list(shared[100:103]) == [7, 8, 9]
    dist.barrier()
    shared.close()
    assert (set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    "why", ["opted out", "another host", "another machine", "no memfd", "no access"]
)
@on_ranks(2)
def test_one_rank_without_it_is_none_with_it(why: str, culprit: int) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    patches: dict[str, AbstractContextManager[object]] = {
        "opted out": mock.patch.dict(os.environ, {OPT_OUT: "0"}),
        "another host": mock.patch.object(Path, "read_text", return_value="another boot"),
        "another machine": mock.patch("platform.machine", return_value="aarch64"),
        "no memfd": mock.patch("os.memfd_create", mock.Mock(side_effect=OSError)),
        "no access": mock.patch("builtins.open", mock.Mock(side_effect=PermissionError)),
    }
    with ExitStack() as stack:
        if rank == culprit:
            stack.enter_context(patches[why])
        shared = map_segment(group, 1 << 16)
    # only the first rank makes the file
    assert (shared is None) == (why != "no memfd" or culprit == 0)


@on_ranks(2)
def test_a_file_that_is_not_the_one_meant_is_refused() -> None:
    group = dist.group.WORLD
    assert group is not None
    with mock.patch("secrets.randbits", return_value=5):
        real = channel._create

        def another(nbytes: int, token: int) -> int:
            return real(nbytes, token + 1)

        with mock.patch.object(channel, "_create", another):
            assert map_segment(group, 1 << 16) is None
