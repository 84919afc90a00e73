"""Values of a unit's parameters for code between the unit's forward and its backward.

A loss may read a parameter of the module itself, such as `model.logit_scale`. While the unit stays
gathered after its forward, that code gets a copy of the gathered values, with the gradient that a
use inside of the forward would have. A view would not do: the backward frees the gathered memory,
and a second pass over the user's part of the graph would read freed memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..parameters.written_values import digest_of


@dataclass(frozen=True, slots=True)
class LentCopy:
    """A copy of the gathered values of a parameter, for code outside of forwards to read."""

    values: Tensor
    # of the values when they were copied, to find a write
    digest: Tensor

    @classmethod
    def of(cls, view: Tensor) -> LentCopy:
        """Return a copy of the values of a view that modules see."""
        values = view.detach().clone()
        return cls(values, digest_of(values))

    @property
    def was_written(self) -> bool:
        """True if the values have changed."""
        return not torch.equal(self.digest, digest_of(self.values))

    def with_gradient_of(self, view: Tensor) -> Tensor:
        """Return the values, whose gradient is a gradient of the view."""
        if not view.requires_grad:
            return self.values.view_as(self.values)
        apply: Any = _LentValues.apply
        lent: Tensor = apply(view, self.values)
        return lent


class _LentValues(Function):
    """A function from a view of gathered values to a copy of the values."""

    @staticmethod
    def forward(ctx: Any, view: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
