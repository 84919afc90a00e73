"""Plans for a model: automatic plans, proposals, and their cost.

May import: nothing.
"""
