"""The parts of c10d that a rank of a lab has: backend, groups, stores, works, and the rank's link.

May import: scheduling.
"""
