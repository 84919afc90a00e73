"""Forms of modules whose bits do not depend on the number of ranks; they replace the lowerings of styles.

May import: errors, row_attention.
"""
