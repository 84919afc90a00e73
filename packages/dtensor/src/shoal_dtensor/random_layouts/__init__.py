"""Layouts of plain local tensors between parallel modules, for random draws as on one device.

May import: _torch, dispatch, errors, layout, modules, rng, scopes, spmd, tensor.
"""
