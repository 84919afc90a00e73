"""Covers: compared.py: collectives that compare what ranks state."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import Comm, CommDebugMode, comm_over, launch
from shoal_mesh.internal import all_to_all_blocks_compared, broadcast_blocks_compared
from shoal_mesh.testing import fake_world

DTYPES = [torch.float32, torch.bool, torch.int8, torch.complex128, torch.float8_e5m2]
# 2 MiB of complex128: two rounds in shared memory
LARGE = 1 << 17


def exchanged(comm: Comm, dtype: torch.dtype, size: int, statement: str) -> tuple[bool, str]:
    """Exchange blocks whose elements are the number of their sender; tell if they are right."""
    own = [[torch.full((size,), comm.rank).to(dtype)] for _ in range(comm.size)]
    out = [[torch.full((size,), 9).to(dtype)] for _ in range(comm.size)]
    difference = all_to_all_blocks_compared(own, comm, out, ["the same", statement], like=own[0][0])
    right = [torch.full((size,), rank).to(dtype) for rank in range(comm.size)]
    arrived = [torch.equal(place[0], block) for place, block in zip(out, right, strict=True)]
    return all(arrived), difference


def exchanged_by_some(comm: Comm) -> str:
    """Exchange blocks between ranks of which the first one has none."""
    like = torch.ones(2)
    has_blocks = comm.rank > 0
    own = [[like] if has_blocks and rank else [] for rank in range(comm.size)]
    return all_to_all_blocks_compared(own, comm, own, ["equal"], like=like)


def sent(comm: Comm, dtype: torch.dtype, size: int, statement: str) -> tuple[bool, str]:
    """Broadcast the last rank's number."""
    blocks = [torch.full((size,), comm.rank).to(dtype), torch.ones(2).to(dtype)]
    last = comm.size - 1
    difference = broadcast_blocks_compared(blocks, comm, last, [statement])
    return torch.equal(blocks[0], torch.full((size,), last).to(dtype)), difference


def compare_on_ranks(transport: str) -> None:
    os.environ["SHOAL_SHARED_MEMORY"] = str(int(transport == "shared memory"))
    order = (2, 0, 1)
    comm = Comm.over(dist.new_group([0, 1, 2]), ("ranks",), order)
    own_rank = dist.get_rank()
    differing = f"rows {own_rank // 2}"
    expected = "ranks 0, 1: rows 0; rank 2: rows 1"
    for dtype in DTYPES:
        for size in (1, LARGE):
            with CommDebugMode() as counted:
                assert exchanged(comm, dtype, size, "equal") == (True, "")
                assert sent(comm, dtype, size, "equal") == (True, "")
            assert counted.get_total_counts() == 2
        assert exchanged(comm, dtype, LARGE, differing)[1] == expected
        difference = sent(comm, dtype, LARGE, differing)[1]
        if transport == "shared memory":
            assert difference == expected
        else:
            # the source is rank 1: only rank 2 differs from it
            told = "rank 2: rows 1; rank 1: another one"
            assert difference == (told if own_rank == 2 else "")
        assert exchanged_by_some(comm) == ""
        # the communicator stays usable
        assert exchanged(comm, dtype, 3, "equal") == (True, "")
    del os.environ["SHOAL_SHARED_MEMORY"]


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
def test_statements_are_compared_in_the_message_that_is_sent_anyway(transport: str) -> None:
    launch(compare_on_ranks, 3, transport)


def test_a_fake_backend_compares_nothing() -> None:
    with fake_world(4):
        comm = comm_over((0, 1, 2, 3))
        assert exchanged(comm, torch.float32, 2, "rows")[1] == ""
        assert sent(comm, torch.float32, 2, "rows")[1] == ""
