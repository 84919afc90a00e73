"""Analysis of the values of all ranks beside the values of one device: equal, or the combination that explains them.

May import: records.
"""
