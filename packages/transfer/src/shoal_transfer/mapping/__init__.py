"""Mappings from the elements of source tensors to the elements of target tensors, as data.

May import: errors.
"""
