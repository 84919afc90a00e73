"""Communicators whose lanes of shared memory have small slots, so that messages take many turns."""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist

from rank_values import over_gloo
from shoal_mesh import Comm
from shoal_mesh.shared_memory import channel


def small_lanes(size: int, lane_bytes: int) -> Comm:
    """A communicator of all ranks with a group of its own, and slots of so many bytes."""
    ranks = tuple(range(size))
    group = dist.new_group(list(ranks))
    lanes = {name: (depth, lane_bytes) for name, (depth, _) in channel.LANES.items()}
    with mock.patch.object(channel, "LANES", lanes):
        shared = channel.channel_of(group)
    assert shared is not None
    assert {lane.slot_bytes for lane in shared.lanes.values()} == {lane_bytes}
    return Comm.over(group, ("ranks",), ranks)


def shared_and_gloo(size: int, lane_bytes: int) -> tuple[Comm, Comm]:
    """Communicators of all ranks: through shared memory with small slots, and through gloo."""
    comm = small_lanes(size, lane_bytes)
    return comm, over_gloo(comm)
