"""Communicators whose shared memory has small slots.

So messages in the background take many rounds.
"""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist

from rank_values import over_gloo
from shoal_mesh import Comm
from shoal_mesh.shared_memory import channel


def small_slots(size: int, slot_bytes: int) -> Comm:
    """A communicator of all ranks with a group of its own, and slots of so many bytes."""
    ranks = tuple(range(size))
    group = dist.new_group(list(ranks))
    slots = {name: (depth, slot_bytes) for name, (depth, _) in channel.BACKGROUND.items()}
    with mock.patch.object(channel, "BACKGROUND", slots):
        shared = channel.channel_of(group)
    assert shared is not None
    assert {stream.slot_bytes for stream in shared.background.values()} == {slot_bytes}
    return Comm.over(group, ("ranks",), ranks)


def shared_and_gloo(size: int, slot_bytes: int) -> tuple[Comm, Comm]:
    """Communicators of all ranks: through shared memory with small slots, and through gloo."""
    comm = small_slots(size, slot_bytes)
    return comm, over_gloo(comm)
