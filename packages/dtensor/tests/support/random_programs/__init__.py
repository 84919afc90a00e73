"""Random programs: whatever they do, the mesh gives what one device gives."""

from .compose import compose
from .hunt import Finding, hunt, on_one, on_ranks, shrink
from .program import Program, run_many, run_one

__all__ = [
    "Finding",
    "Program",
    "compose",
    "hunt",
    "on_one",
    "on_ranks",
    "run_many",
    "run_one",
    "shrink",
]
