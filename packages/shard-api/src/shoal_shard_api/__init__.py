"""Sharded tensors described by specs: ShardedTensor, sharding plans and sharders."""

from .__about__ import __version__

__all__ = ["__version__"]
