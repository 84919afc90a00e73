"""What users call beside the class: creation, functions over shards, random state, own rules, explanations.

May import: _torch, argument_types, dispatch, errors, host_memory, layout, redistribute, rng, rows_of_ranks, rules,
scopes, tensor.
"""
