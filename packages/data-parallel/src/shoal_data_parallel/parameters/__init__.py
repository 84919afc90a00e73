"""Parameters on data axes: the user's policies, meshes, and one parameter's shards and layouts.

May import: nothing.
"""
