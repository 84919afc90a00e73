"""What users call beside the class: creation, functions over shards, random state, own rules, explanations.

May import: _torch, argument_types, errors, layout, modules, redistribute, rng, rules, scopes,
tensor.
"""
