"""How one module is parallel on one mesh axis, as immutable values: no mesh, no communication.

May import: nothing.
"""
