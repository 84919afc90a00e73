"""How a tensor is placed on a mesh, as immutable values: no tensor, no communication.

May import: _torch, argument_types, errors.
"""
