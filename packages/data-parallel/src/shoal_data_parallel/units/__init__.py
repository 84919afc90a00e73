"""Units of `fully_shard`: gathered for a forward and a backward, and freed after each.

May import: _torch, gradients, parameters.
"""
