"""Files of weights: read and written shard by shard.

May import: errors.
"""
