"""Analysis: compare the values of all ranks with the values of one device, and explain differences.

May import: records.
"""
