"""Collectives over one or several mesh axes: any dtype, any sizes, called straight on the process group.

May import: _torch, argument_types, errors, events, groups, mesh, scoped_value, shared_memory,
transport.
"""
