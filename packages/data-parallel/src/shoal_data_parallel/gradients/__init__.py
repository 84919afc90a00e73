"""Gradients over data axes: which are reduced together, in which collectives, and by which divisor.

May import: _torch, parameters.
"""
