"""Covers: peers.py: what a rank says that has given up. Ranks that end are in the tests of channels and streams."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from shoal_mesh.errors import CollectiveError
from shoal_mesh.shared_memory.peers import ANNOUNCED, BROKEN, LINE, REASON_BYTES, Peers
from shoal_mesh.shared_memory.recorder import request
from shoal_mesh.testing import on_ranks


def peers_of(group: dist.ProcessGroup, words: int, own: Sequence[int]) -> Peers:
    """Both ranks, with so many words before what they announce."""
    memory = memoryview(bytearray(8 * (words + 2 * (ANNOUNCED + LINE)))).cast("Q")
    reasons = memoryview(bytearray(REASON_BYTES * 2))
    return Peers(group, [os.getpid()] * 2, memory, own, reasons, words)


@on_ranks(2)
def test_who_gives_up_says_so_in_all_of_its_words() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    asked = [request("all_gather", torch.float32, 3), request("broadcast", torch.int64, 2, "", 1)]
    differing = str(peers_of(group, 8, (rank,)).differ((0, 1), asked))
    assert differing.endswith("rank 0: all_gather of 3 x float32, rank 1: broadcast from 1 of 2 x int64")
    peers = peers_of(group, 8, (rank, 4 + rank))
    words = peers.words
    peers.check()
    words[1 - rank] = 7
    peers.wait(1 - rank, 7, 1 - rank)
    words[1 - rank] = BROKEN
    with pytest.raises(CollectiveError, match=rf"rank {1 - rank} \(process {os.getpid()}\) has given up"):
        peers.wait(1 - rank, 8, 1 - rank)
    assert [words[i] == BROKEN for i in (rank, 4 + rank, 5 - rank)] == [True, True, False]
    with pytest.raises(CollectiveError, match="given up"):  # the first failure stays the one that is reported
        raise peers.fail("another")
    with pytest.raises(CollectiveError, match="given up"):
        peers.check()
