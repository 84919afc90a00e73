"""Execution of plans on this rank: kernels, single plans, and messages that serve many plans.

May import: blocks, steps.
"""
