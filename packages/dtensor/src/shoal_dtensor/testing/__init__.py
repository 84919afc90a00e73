"""For tests of this layer and of what is built on it: plans run in one process, on plain tensors."""

from .cases import draw_spec, spec_pairs
from .simulate import coordinates, global_value, local_shards, part_of, simulate

__all__ = ["coordinates", "draw_spec", "global_value", "local_shards", "part_of", "simulate", "spec_pairs"]
