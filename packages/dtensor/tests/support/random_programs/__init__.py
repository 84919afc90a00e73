"""Random programs whose results on a mesh must equal one device."""

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
