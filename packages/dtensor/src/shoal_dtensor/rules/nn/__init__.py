"""Rules of neural network operators: norms, convolution, operators on images, attention, losses.

May import: exchange, language.
"""
