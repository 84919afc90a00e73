"""Rules of neural network operators: normalisation, convolution, operators on images, attention, losses.

May import: exchange, language.
"""
