"""Sharded tensors on a device mesh: placements, redistribution, sharding rules and random numbers."""

from .__about__ import __version__
from .placements import Partial, Placement, Replicate, Shard, StridedShard

__all__ = ["Partial", "Placement", "Replicate", "Shard", "StridedShard", "__version__"]
