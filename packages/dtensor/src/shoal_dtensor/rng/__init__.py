"""Random numbers that do not depend on the mesh.

`draw` fills a rank's box of a global tensor. The random mode selects the method. `memory_walk`
computes the order in which one device would fill the global tensor, `streams` follows a device's
generator, `counter` makes values from the element's index alone (with Philox), and `state` holds
the mode, saves and restores generators, and checks that ranks agree. Nothing here depends on
operators or DTensors.

May import: _torch, argument_types, errors, host_memory, layout, rows_of_ranks.
"""
