"""Rules of operators that change the shape or the place of elements.

May import: exchange, language.
"""
