"""Rules of arithmetic: pointwise, products, reductions, sorting, creation and random numbers.

May import: exchange, language.
"""
