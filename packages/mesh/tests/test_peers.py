"""Messages of a rank that has given up a collective. Tests of channels and streams end ranks.

Covers: peers.py.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from shoal_mesh.errors import CollectiveError
from shoal_mesh.testing import on_ranks
from shoal_mesh.watch.peers import BROKEN, Peers, head_bytes
from shoal_mesh.watch.recorder import request


def peers_of(group: dist.ProcessGroup) -> Peers:
    """All ranks, with two streams, in memory of this rank."""
    size = group.size()
    return Peers(group, [os.getpid()] * size, memoryview(bytearray(head_bytes(size, 2))), 2)


@on_ranks(2)
def test_who_gives_up_says_so_in_all_of_its_words() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    asked = [request("all_gather", torch.float32, 3), request("broadcast", torch.int64, 2, "", 1)]
    peers = peers_of(group)
    differing = str(peers.differ(peers.lines[0], asked))
    assert differing.endswith(
        "rank 0: all_gather of 3 x float32, rank 1: broadcast from 1 of 2 x int64"
    )
    peers = peers_of(group)
    words, other = peers.words, peers.lines[0][1 - rank]
    peers.check()
    words[other] = 7
    peers.wait(other, 7, 1 - rank)
    words[other] = BROKEN
    with pytest.raises(
        CollectiveError, match=rf"rank {1 - rank} \(process {os.getpid()}\) has given up"
    ):
        peers.wait(other, 8, 1 - rank)
    own = [lines[rank] + word for lines in peers.lines for word in (0, 1)]
    assert {i for i, word in enumerate(words) if word == BROKEN} == {other, *own}
    # the first failure stays the one that is reported
    with pytest.raises(CollectiveError, match="given up"):
        raise peers.fail("another")
    with pytest.raises(CollectiveError, match="given up"):
        peers.check()


# it waited until the timeout of the process group
@on_ranks(3, timeout=60)
def test_a_wait_ends_if_a_rank_that_is_not_awaited_gives_up() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    peers = peers_of(group)
    awaited, other = (rank + 1) % 3, (rank + 2) % 3
    peers.words[peers.lines[0][other]] = BROKEN
    with pytest.raises(CollectiveError, match=rf"rank {other} \(process .*\) has given up"):
        peers.wait(peers.lines[1][awaited], 1, awaited)
