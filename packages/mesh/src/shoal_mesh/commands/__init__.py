"""Command lines: the program `shoal`, and the commands of `python -m shoal_mesh`.

May import: __about__, accelerator, local_ranks, mesh, topology, watch.
"""
