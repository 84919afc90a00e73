"""Every private or unstable torch name that this package uses, by theme.

May import: nothing.
"""
