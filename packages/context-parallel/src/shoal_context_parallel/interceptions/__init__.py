"""Attention that no mode of torch observes: `flex_attention`, and that of models of transformers.

May import: _torch, context_options, errors, sequence_layout.
"""
