"""Rules of arithmetic: pointwise and optimizers, linear algebra, reductions, sorting, creation and random numbers.

May import: language.
"""
