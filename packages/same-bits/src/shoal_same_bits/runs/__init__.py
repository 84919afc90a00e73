"""Fingerprints of the values of a run, and the first value at which two runs differ.

May import: nothing.
"""
