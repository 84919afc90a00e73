"""Redistribution between any two placements: `plan` decides, `run_plan` executes.

Planning and execution do not depend on each other.

May import: errors, layout.
"""
