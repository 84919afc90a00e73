"""From any placement to any placement: `plan` decides, `run` executes, neither knows the other."""

from .coalesce import run_all
from .plan import alternatives, cost, plan, seconds
from .run import InFlight, run, start
from .steps import Plan, Step

__all__ = ["InFlight", "Plan", "Step", "alternatives", "cost", "plan", "run", "run_all", "seconds", "start"]
