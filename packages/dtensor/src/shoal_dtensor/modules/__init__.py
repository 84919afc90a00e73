"""Shared parts of the layers on modules: replaced forwards, owners of parameters, attributes.

May import: _torch, errors, layout, tensor.
"""
