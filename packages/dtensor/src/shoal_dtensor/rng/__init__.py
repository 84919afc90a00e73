"""Random numbers that do not depend on the mesh.

`draw` fills a rank's box of a global tensor.  How, the mode says: `memory_order` knows in which order one device would
fill the global tensor, `cpu` and `cuda` follow that device's stream, `counter` makes values from the element's index
alone (with `philox`), and `state` holds what is around generators: seeds, save and restore, and the check that ranks
agree.  Nothing here knows operators or DTensors.

May import: _torch, errors, host_memory, layout, rows_of_ranks, scoped_value.
"""
