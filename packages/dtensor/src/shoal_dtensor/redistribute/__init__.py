"""From any placement to any placement: `plan` decides, `run` executes, neither knows the other."""

from .coalesce import Batch, Queued, coalesce, current_batch, run_all
from .once import run_once, write_back
from .plan import alternatives, cost, plan, seconds
from .run import InFlight, run, start
from .steps import Plan, Step

__all__ = [
    "Batch",
    "InFlight",
    "Plan",
    "Queued",
    "Step",
    "alternatives",
    "coalesce",
    "cost",
    "current_batch",
    "plan",
    "run",
    "run_all",
    "run_once",
    "seconds",
    "start",
    "write_back",
]
