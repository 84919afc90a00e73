"""How a rule is written: rows, factor notation, tables, and what local functions share.

May import: nothing.
"""
