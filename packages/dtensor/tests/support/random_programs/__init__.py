"""Random programs whose results on a mesh must equal one device."""

from .compose import compose
from .hunt import Finding, hunt, on_one, on_ranks, shrink
from .program import Program, run_many, run_one
from .stops import Stop, draw_stop, verdict_of_stop

__all__ = [
    "Finding",
    "Program",
    "Stop",
    "compose",
    "draw_stop",
    "hunt",
    "on_one",
    "on_ranks",
    "run_many",
    "run_one",
    "shrink",
    "verdict_of_stop",
]
