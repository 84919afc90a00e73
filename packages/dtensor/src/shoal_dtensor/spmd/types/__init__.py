"""Types of plain tensors as values: along one mesh axis, along all axes, and the axes themselves.

May import: nothing.
"""
