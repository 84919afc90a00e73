"""Types of plain local tensors per mesh axis, and the checker that infers them from the rules.

May import: _torch, dispatch, errors, layout, rules, scopes,
tensor.
"""
