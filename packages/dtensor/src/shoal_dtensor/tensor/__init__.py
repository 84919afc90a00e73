"""The class DTensor: autograd, gradients of parameters, indexing and serialization.

May import: _torch, argument_types, crossings, dispatch, errors, host_memory, layout, redistribute, rng,
rows_of_ranks, scopes.
"""
