"""The scheduler of a lab: calls as data, their meetings, the turns of ranks, and texts about both.

May import: nothing.
"""
