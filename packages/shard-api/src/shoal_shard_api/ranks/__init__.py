"""How the ranks of one process group agree on arguments and move shards between them.

May import: errors, spec.
"""
