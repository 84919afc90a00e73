"""Plans for a model: automatic ones, proposals, what they cost.

May import: nothing.
"""
