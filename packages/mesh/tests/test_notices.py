"""Covers: notices.py. What ranks do with them is in the tests of lockstep."""

from __future__ import annotations

import os
import threading

import torch.distributed as dist

from shoal_mesh.shared_memory.notices import NOTICE_WORDS, Notices
from shoal_mesh.shared_memory.peers import Peers
from shoal_mesh.testing import on_ranks


@on_ranks(2)
def test_notices_of_two_ranks_in_one_process() -> None:
    group, memory = dist.group.WORLD, bytearray(2 * NOTICE_WORDS * 8)
    assert group is not None
    words = memoryview(memory).cast("Q")
    peers, its_peers, rank = (*(Peers(group, [os.getpid()] * 2, words, ()) for _ in range(2)), group.rank())
    its_peers.rank = 1 - rank
    own, other = Notices(peers, 0, memoryview(memory)), Notices(its_peers, 0, memoryview(memory))
    own.post((5, 6, 0), b"first")
    assert own.same(1) is None
    assert own.numbers(1)[rank] == (5, 6, 0)
    assert own.numbers(1)[1 - rank] is None
    assert (other.text(rank), other.text(1 - rank)) == ("first", "")
    other.post((5, 6, 0), b"first")
    assert own.same(1) is True
    own.post((7, 6, 0), "ü".encode() * 400)
    other.post((7, 5, 0), b"second")
    assert own.same(2) is other.same(2) is False
    assert len(own.text(rank)) == 255
    for i in range(14):
        own.post((i, 0, 0), b"")
    waits = threading.Thread(target=own.post, args=((1, 1, 0), b"seventeenth"))
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()  # the other rank has come to the second only, which it may still read
    other.post((0, 0, 0), b"")
    waits.join(5)
    assert own.count == 17
