"""Rules of operators that look up or write by index, and of data-dependent shapes.

May import: language, shape.
"""
