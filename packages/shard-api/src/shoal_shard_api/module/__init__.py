"""Sharding of modules and their parameters, and the optimizer that steps local shards.

May import: arguments, errors, ops, ranks, spec, tensor.
"""
