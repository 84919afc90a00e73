"""Rules of neural network operators: normalisation, convolution, pooling, attention, losses, optimizers.

May import: exchange, language.
"""
