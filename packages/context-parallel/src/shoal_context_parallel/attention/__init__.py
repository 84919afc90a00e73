"""Attention of this rank's queries to the keys of all ranks: methods, blocks of keys, tiles, kernels.

May import: _torch, errors, sequence_layout.
"""
