"""The scheduler of a lab: posted calls, their meetings, the turns of ranks, and texts of errors.

May import: nothing.
"""
