"""What shards the parameters of modules, and the optimizer that steps on local shards.

May import: arguments, errors, ops, ranks, spec, tensor.
"""
