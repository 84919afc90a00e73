"""Forms of modules whose bits do not depend on the number of ranks, in place of lowerings.

May import: errors, row_attention.
"""
