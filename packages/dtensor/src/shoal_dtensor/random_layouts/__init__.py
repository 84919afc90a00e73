"""Layouts of plain local tensors between parallel modules, so that random draws match one device.

May import: _torch, dispatch, errors, layout, modules, rng, scopes, tensor.
"""
