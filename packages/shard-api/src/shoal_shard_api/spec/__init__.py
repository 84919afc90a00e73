"""Sharding specs and shard metadata as immutable values: no tensor data, no process group.

May import: _torch, errors.
"""
