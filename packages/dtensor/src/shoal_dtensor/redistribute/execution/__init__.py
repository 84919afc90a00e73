"""Execution of plans on a rank: its part of each step, single plans, and messages of many plans.

May import: blocks, steps.
"""
