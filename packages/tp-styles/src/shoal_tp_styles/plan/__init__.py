"""Styles by module path: resolved, verified, priced and applied.

May import: _torch, apply, errors, lowering, sharding, styles.
"""
