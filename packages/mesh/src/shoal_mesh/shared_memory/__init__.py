"""Collectives of CPU tensors through memory shared by ranks of one host, in place of gloo.

May import: _torch, errors, transport, watch.
"""
