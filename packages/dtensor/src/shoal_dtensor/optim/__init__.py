"""What optimizers need: clipping by a global norm, and steps on local shards.

May import: _torch, argument_types, dispatch, errors, host_memory, layout, redistribute, tensor.
"""
