"""Operations on ShardedTensors: on each shard alone, or by way of a DTensor of the same shards.

May import: _torch, arguments, errors, ranks, spec.
"""
