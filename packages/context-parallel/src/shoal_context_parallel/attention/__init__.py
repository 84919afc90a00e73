"""Attention from this rank's queries to the keys of all ranks: methods, blocks, tiles, kernels.

May import: _torch, context_options, errors, sequence_layout.
"""
