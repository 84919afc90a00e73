"""Functions for users: creation, local functions, random state, custom rules, explanations.

May import: _torch, argument_types, errors, layout, modules, redistribute, rng, rules, scopes,
spmd, tensor.
"""
