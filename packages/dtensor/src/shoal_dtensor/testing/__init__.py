"""Checks of a rule or of a redistribution plan in one process, for those who write rules and plans."""

from .partials import deal, gather
from .simulate import coordinates, global_value, local_shards, part_of, simulate
from .thread_ranks import ThreadMesh, on_threads, thread_meshes
from .validate import Report, validate

__all__ = [
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
    "thread_meshes",
    "validate",
]
