"""Attention on sequences that are sharded over a mesh axis: all-gather, ring and Ulysses."""
