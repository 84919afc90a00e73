"""Running a plan on this rank: kernels, packed buffers, async and coalesced collectives.

May import: blocks, reductions, steps.
"""
