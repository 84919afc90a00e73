"""Support for optimizers: clipping by a global norm, and steps on local shards.

May import: _torch, argument_types, errors, host_memory, layout, redistribute, tensor.
"""
