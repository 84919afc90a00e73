"""Records of the last collectives of this process, and watches over the ranks of its groups.

May import: _torch, argument_types, errors.
"""
