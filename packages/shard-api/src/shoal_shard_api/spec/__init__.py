"""Sharding specs and shard metadata as immutable values: no tensor data, no process group."""
