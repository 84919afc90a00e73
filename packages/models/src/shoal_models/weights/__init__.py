"""Weights of models: read, written and sent shard by shard.

May import: errors.
"""
