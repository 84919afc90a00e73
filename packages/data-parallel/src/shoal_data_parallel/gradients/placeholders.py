"""Zeros without memory, in place of gradients that this rank keeps.

Pipeline schedules that split a backward call `torch.autograd.grad` for parameters, and put the
results into `.grad` themselves. The gradients are kept for the reduction at the end of the step, so
the schedule gets zeros. They hold one number each, for as long as the step runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from shoal_dtensor import DTensor
from shoal_dtensor.internal import local_of

_PLACEHOLDER = "_shoal_placeholder"


def placeholder_for(param: Tensor) -> Tensor:
    """Return zeros for a schedule to put into `.grad`, and remove those of an earlier backward.

    The schedule would add to those in place, which their memory does not allow.
    """
    drop_placeholders([param])
    local = local_of(param)
    zeros = local.new_zeros(()).expand(local.shape)
    placeholder: Tensor = DTensor(zeros, param.spec) if isinstance(param, DTensor) else zeros
    setattr(placeholder, _PLACEHOLDER, True)
    return placeholder


def drop_placeholders(params: Iterable[Tensor]) -> None:
    """Remove zeros without memory from `.grad`."""
    for param in params:
        if hasattr(param.grad, _PLACEHOLDER):
            param.grad = None
