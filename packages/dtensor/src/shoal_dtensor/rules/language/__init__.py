"""The language of rules: rows, factor notation, tables and helpers of local functions.

May import: nothing.
"""
