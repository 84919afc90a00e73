"""Moves of local tensors along one mesh axis, which collectives and conversions run.

May import: nothing.
"""
