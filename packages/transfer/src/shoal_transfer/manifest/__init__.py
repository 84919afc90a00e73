"""Manifests: which rank holds which box of which weight, and where in its memory.

May import: errors, mapping.
"""
