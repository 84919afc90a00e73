"""Styles by module path: resolved, verified, priced and applied.

May import: apply, errors, lowering, sharding, styles.
"""
