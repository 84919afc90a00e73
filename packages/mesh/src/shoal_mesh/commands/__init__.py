"""What `python -m shoal_mesh` can do: one module a command, with `add_options(parser)` and `run(asked) -> status`.

May import: __about__, local_ranks, mesh, shared_memory, topology.
"""
