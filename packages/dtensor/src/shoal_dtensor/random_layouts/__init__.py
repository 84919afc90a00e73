"""Layouts of plain local tensors between parallel modules, so that what draws there draws as one device.

May import: _torch, errors, layout, modules, rng, scopes, tensor.
"""
