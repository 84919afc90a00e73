"""What the ranks of this process's groups do: the last collectives, and ranks that do not arrive.

May import: _torch, argument_types, errors.
"""
