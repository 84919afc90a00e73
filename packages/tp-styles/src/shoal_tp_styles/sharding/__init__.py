"""Immutable descriptions of one parallel module on one mesh axis: no mesh, no communication.

May import: nothing.
"""
