"""Sharded tensors on a device mesh: placements, redistribution, sharding rules and random numbers."""

from .__about__ import __version__

__all__ = ["__version__"]
