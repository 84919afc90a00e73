"""The class DTensor: autograd, gradients of parameters, indexing and serialization.

May import: _torch, argument_types, crossings, dispatch, errors, host_memory, layout, redistribute,
rows_of_ranks, scopes.
"""
