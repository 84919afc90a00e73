"""Every private or unstable torch name that this package uses, by subject.

May import: errors.
"""
