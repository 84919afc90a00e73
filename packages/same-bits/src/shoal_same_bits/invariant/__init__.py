"""Forms of modules whose bits do not depend on the number of ranks, in place of the lowerings of `modules`.

May import: errors, row_attention.
"""
