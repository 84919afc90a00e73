"""The parts of c10d on a rank of a lab: backend, groups, stores, works, and the rank's link.

May import: scheduling.
"""
