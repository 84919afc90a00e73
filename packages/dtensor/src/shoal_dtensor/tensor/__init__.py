"""The class DTensor: autograd, gradients of parameters, indexing and serialization.

May import: _torch, argument_types, dispatch, errors, host_memory, layout, redistribute, rng, scoped_value, scopes.
"""
