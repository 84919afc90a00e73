"""Covers: vain_waits.py, watch/processes.py: ranks that wait for ranks which have returned."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import DeviceMesh, all_reduce, comm_over, init_device_mesh, launch
from shoal_mesh.errors import RankError
from shoal_mesh.testing import rank_pool


def _waits_for_the_others(how: str) -> None:
    if dist.get_rank() == 0:
        if how == "a mesh":
            init_device_mesh("cpu", (2,))
        elif how == "gloo":
            dist.all_reduce(torch.ones(2))
        else:
            all_reduce(torch.ones(2), comm_over((0, 1)))


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


@pytest.mark.parametrize("how", ["gloo", "shared memory", "a mesh"])
def test_a_rank_that_waits_for_one_that_has_returned_is_named(how: str) -> None:
    start = time.monotonic()
    with pytest.raises(
        RankError, match="_waits_for_the_others failed on rank 0 of 2; rank 1 had returned"
    ):
        launch(_waits_for_the_others, 2, how)
    assert time.monotonic() - start < 40  # starting ranks included


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
