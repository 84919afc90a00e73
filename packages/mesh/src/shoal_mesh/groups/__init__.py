"""Process groups: how they are made and found, and how the ranks of a group agree.

May import: _torch, accelerator, argument_types, errors, transport, watch.
"""
