"""The class ShardedTensor, its shards, and every way to construct one.

May import: arguments, errors, ops, ranks, spec.
"""
