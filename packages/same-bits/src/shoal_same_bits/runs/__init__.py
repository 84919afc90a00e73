"""What a run computes, recorded small, and where two runs differ first.

May import: nothing.
"""
