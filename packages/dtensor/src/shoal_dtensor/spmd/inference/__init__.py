"""The types of an operator's results, inferred from the rule that DTensors follow.

May import: types.
"""
