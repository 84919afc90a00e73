"""Layouts of plain local tensors between parallel modules, so that what draws there draws as one device.

May import: _torch, dispatch, errors, layout, modules, rng, scopes, tensor.
"""
