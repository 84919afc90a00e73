"""Execution of plans on this rank: its part of each step, single plans, and messages that serve many plans.

May import: blocks, steps.
"""
