"""From any placement to any placement: `plan` decides, `run` executes, neither knows the other."""

from .coalesce import Batch, Queued, coalesce, current_batch, run_all
from .norms import powers, root
from .once import run_once
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
    "powers",
    "root",
    "run",
    "run_all",
    "run_once",
    "seconds",
    "start",
]
