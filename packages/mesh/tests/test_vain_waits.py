"""Covers: vain_waits.py, watch/processes.py: ranks that wait for ranks which have returned."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

from shoal_mesh import DeviceMesh, all_reduce, comm_over, init_device_mesh, launch
from shoal_mesh.errors import RankError
from shoal_mesh.local_ranks.vain_waits import VainWaits
from shoal_mesh.testing import rank_pool


def _waits_for_the_others(how: str) -> None:
    if dist.get_rank() == 0:
        if how == "a mesh":
            init_device_mesh("cpu", (2,))
        elif how == "gloo":
            dist.all_reduce(torch.ones(2))
        elif how == "a work of gloo":
            work: Any = dist.all_reduce(torch.ones(2), async_op=True)
            work.wait()
        elif how == "a collective of torch's compiler":
            assert dist.group.WORLD is not None
            functional_all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum()
        else:
            all_reduce(torch.ones(2), comm_over((0, 1)))


def _waits_in_backward() -> None:
    model: Any = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    out = model(torch.ones(2, 4))
    if dist.get_rank() == 0:
        out.sum().backward()


def _waits_for_a_thread() -> int:
    if dist.get_rank() == 0:
        event = threading.Event()
        threading.Timer(7.0, event.set).start()
        event.wait()
    return dist.get_rank()


def _sends_and_returns() -> float:
    received = torch.zeros(1 << 20)
    if dist.get_rank() == 1:
        dist.send(received + 1, 0)
    else:
        time.sleep(0.5)
        dist.recv(received, 1)
    return received.sum().item()


def _waits_behind_one_that_waits_in_vain() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    rank = dist.get_rank()
    if rank == 2:
        return
    first = DeviceMesh.from_group(groups[0], "cpu")
    all_reduce(torch.ones(4), (first, 0))
    if rank == 1:
        # the first collective of the second group, for which rank 2 does not come
        all_reduce(torch.ones(4), (DeviceMesh.from_group(groups[1], "cpu"), 0))
    all_reduce(torch.ones(4), (first, 0))


HOW = ["gloo", "shared memory", "a mesh", "a work of gloo", "a collective of torch's compiler"]


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_waits_for_one_that_has_returned_is_named(how: str) -> None:
    start = time.monotonic()
    with pytest.raises(
        RankError, match="_waits_for_the_others failed on rank 0 of 2; rank 1 had returned"
    ):
        launch(_waits_for_the_others, 2, how)
    assert time.monotonic() - start < 40  # starting ranks included


def test_a_backward_that_waits_for_a_rank_that_has_returned() -> None:
    """Pipeline stages of torch, DistributedDataParallel and others wait in C++ too."""
    start = time.monotonic()
    with pytest.raises(RankError, match="waited in a collective for ranks that had"):
        rank_pool(2).run(_waits_in_backward, timeout=60.0)
    assert time.monotonic() - start < 40


def test_other_waits_go_on() -> None:
    assert rank_pool(2).run(_waits_for_a_thread) == [0, 1]


@pytest.mark.parametrize(("program", "waits"), [("time.sleep(60)", True), ("while 1: pass", False)])
def test_a_backward_that_computes_does_not_wait(program: str, waits: bool) -> None:
    dump = 'Thread 0x1:\n  File "torch/autograd/graph.py", line 9 in _engine_run_backward\n'
    process = subprocess.Popen([sys.executable, "-c", f"import time\n{program}"])
    try:
        vain_waits = VainWaits(lambda ranks: {0: dump})
        seen = []
        for _ in range(3):
            time.sleep(vain_waits.seconds_to_next())
            seen.append(vain_waits.are_seen({0: process.pid}))
    finally:
        process.kill()
        process.wait()
    # the first look has none to compare with; the second may see the process start
    assert seen[0] is False
    assert seen[2] is waits


def test_ranks_that_wait_for_one_that_waits_for_a_rank_that_has_returned() -> None:
    """Rank 0 waits in shared memory for rank 1, which waits in gloo for a returned rank."""
    start = time.monotonic()
    with pytest.raises(
        RankError, match="rank 2 has returned, and others wait in the first"
    ) as error:
        rank_pool(3).run(_waits_behind_one_that_waits_in_vain, timeout=60.0)
    assert "failed on ranks 0, 1 of 3" in str(error.value)
    # starting ranks included
    assert time.monotonic() - start < 40


def test_a_rank_may_return_before_others_have_what_it_sent() -> None:
    assert launch(_sends_and_returns, 2) == [float(1 << 20), 0.0]
