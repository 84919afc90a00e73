"""The class ShardedTensor, its shards, and every way to construct one.

May import: _torch, arguments, errors, ops, ranks, spec.
"""
