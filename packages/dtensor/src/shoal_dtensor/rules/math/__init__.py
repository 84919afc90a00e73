"""Rules of arithmetic: pointwise and optimizer operators, linear algebra, reductions and others.

The others are sorting, creation and random numbers.

May import: language.
"""
