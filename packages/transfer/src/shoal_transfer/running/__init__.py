"""Runs of a plan: programs of one rank, wires between ranks, deltas, digests and faults.

May import: errors, manifest, planning.
"""
