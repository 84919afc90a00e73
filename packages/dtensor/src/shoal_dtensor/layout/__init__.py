"""Layouts: the placement of a tensor on a mesh as immutable values.

Nothing here uses tensors or communication.

May import: _torch, argument_types, errors.
"""
