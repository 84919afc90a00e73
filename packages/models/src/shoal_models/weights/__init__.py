"""Weights of models: reading, writing and sending, shard by shard.

May import: errors.
"""
