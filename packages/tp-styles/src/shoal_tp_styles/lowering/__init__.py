"""What every local computation is built from: parameters, ports and collectives with their gradients.

May import: _torch, sharding.
"""
