"""Running plans on this rank: kernels, one plan at once, and messages in which many travel.

May import: blocks, steps.
"""
