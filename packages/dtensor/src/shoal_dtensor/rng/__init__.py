"""Random numbers that do not depend on the mesh.

`draw` fills a rank's box of a global tensor. How, the mode says: `memory_order` knows in which
order one device would fill the global tensor, `streams` follows a device's generator, `counter`
makes values from the element's index alone (with Philox), and `state` holds the mode and what is
around generators: save and restore, the check that ranks agree. Nothing here knows operators or
DTensors.

May import: _torch, errors, host_memory, layout, rows_of_ranks.
"""
