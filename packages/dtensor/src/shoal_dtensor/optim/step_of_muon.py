"""Every step of torch's Muon that has DTensors among its parameters is `muon_step`: a hook before optimizers' steps.

torch's own step multiplies matrices operator by operator: 11 to 21 collectives each on shards, rounded otherwise.
"""

from __future__ import annotations

from typing import Any

import torch

from .._torch import before_optimizer_steps
from ..tensor.dtensor import DTensor

__all__ = ["install_step_of_muon"]


class _Stepping:
    """What torch's step gets for its optimizer: asked for parameter groups, it steps, and has none."""

    __slots__ = ("_optimizer",)

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[Any]:
        """No groups: what there was to do is done, after the closure, which torch's step calls first."""
        from .muon import muon_step  # here: few optimizers are Muon

        muon_step(self._optimizer)
        return []


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of a step, with a stand-in for a Muon of DTensors; None leaves them."""
    if type(optimizer) is not torch.optim.Muon or torch.compiler.is_compiling():
        return None
    if not any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]):
        return None
    return (_Stepping(optimizer), *args[1:]), kwargs


def install_step_of_muon() -> None:
    """Have the hook called before every optimizer's step."""
    before_optimizer_steps(_before_step)
