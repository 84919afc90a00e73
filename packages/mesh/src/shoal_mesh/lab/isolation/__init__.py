"""The ranks of a lab: threads of this process, or processes with a coordinator in their parent.

May import: c10d, rank_state, scheduling.
"""
