"""Device meshes: ranks at coordinates, with a process group along every axis.

May import: _torch, accelerator, argument_types, errors, groups, notebook_html, shared_memory,
watch.
"""
