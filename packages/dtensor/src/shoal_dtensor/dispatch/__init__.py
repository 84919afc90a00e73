"""One operator call: its key, the cached decision, the local call, and the result.

May import: _torch, argument_types, crossings, errors, layout, redistribute, rng, rows_of_ranks,
rules, scopes.
"""
