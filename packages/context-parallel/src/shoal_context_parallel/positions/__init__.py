"""Positions in local tensors: followed through the functions of torch, which must not mix them.

May import: errors, sequence_layout.
"""
