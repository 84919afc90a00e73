"""The local computation of each module type, with explicit collectives.

May import: _torch, lowering, sharding.
"""
