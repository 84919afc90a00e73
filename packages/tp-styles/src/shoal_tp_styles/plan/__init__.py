"""Styles by module path: resolved, verified, priced and applied.

May import: _torch, apply, errors, full_tensors, lowering, sharding, styles.
"""
