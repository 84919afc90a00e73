"""Transfer plans: which rank sends which elements to which rank, and the proof that it is right.

May import: errors, manifest, mapping.
"""
