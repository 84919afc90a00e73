"""Device meshes: which rank is at which coordinate, and the process group along every axis.

May import: _torch, accelerator, argument_types, errors, groups, shared_memory.
"""
