"""Tests of programs, rules and plans on ranks that are threads of one process.

May import: _torch, dispatch, layout, redistribute, rng, rules.
"""

from shoal_mesh.lab import (
    RandomStates,
    ThreadMesh,
    on_threads,
    simulate_ranks,
    thread_meshes,
)

from .simulate import coordinates, deal, gather, global_value, local_shards, part_of, simulate
from .validate import Report, validate

__all__ = [
    "RandomStates",
    "Report",
    "ThreadMesh",
    "coordinates",
    "deal",
    "gather",
    "global_value",
    "local_shards",
    "on_threads",
    "part_of",
    "simulate",
    "simulate_ranks",
    "thread_meshes",
    "validate",
]
