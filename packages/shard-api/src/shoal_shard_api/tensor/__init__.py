"""The class ShardedTensor, its shards, and every way to construct one."""
