"""A partial norm is asked for several times (is it finite? what to divide by? its backward): it is reduced once."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from ..placements import norm_order
from .run import run
from .steps import Plan

__all__ = ["run_once"]

# Elements of a norm that is remembered: a total, or one for each row of a small weight.
MAX_ELEMENTS = 256


def run_once(plan: Plan, local: Tensor, owner: Any, *, fresh: bool = False) -> Tensor:
    """What `run` gives; for a small partial norm, what it gave before if the tensor has not been written to since.

    Args:
        plan: as for `run`.
        local: the local tensor; owner: the DTensor that it is of, which keeps the result.
        fresh: whether the result may be written to.
    """
    src = plan.src
    if not src.partials or norm_order(src.partials[0][1]) is None or prod(src.shape) > MAX_ELEMENTS:
        return run(plan, local)
    if owner.is_inference():  # such tensors do not count how often they are written to
        return run(plan, local)
    state = (plan.dst, owner._version, local._version)
    known = owner.__dict__.get("_reduced")
    if known is None or known[0] != state or known[1] is not local:
        known = owner._reduced = (state, local, run(plan, local))
    result: Tensor = known[2]
    return result.clone() if fresh else result
