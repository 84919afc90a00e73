"""Building blocks of local computation: parameters, ports and collectives with their gradients.

May import: _torch, sharding.
"""
