"""Mappings learned from code that loads weights: the code runs on meta tensors and is recorded.

May import: errors, manifest, mapping.
"""
