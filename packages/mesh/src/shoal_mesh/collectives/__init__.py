"""Collectives over one or several mesh axes, of any dtype and any sizes.

May import: _torch, argument_types, errors, events, groups, mesh, scoped_value, shared_memory,
transport, watch.
"""
