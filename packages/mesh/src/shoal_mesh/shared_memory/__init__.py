"""Collectives of ranks on one host through memory that they share, for CPU tensors of groups that would use gloo.

May import: _torch, argument_types, errors, transport.
"""
