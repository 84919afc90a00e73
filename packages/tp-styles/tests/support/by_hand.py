"""Linear layers of tensor parallelism as one writes them by hand, to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class HandCopy(Function):
    """Identity, as one writes it by hand: the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """`x` itself."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The sum of the ranks' gradients."""
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad)
        return grad


class HandReduce(Function):
    """Sum over the ranks in place, as one writes it by hand: the gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors."""
        torch.distributed.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """`grad` itself."""
        return grad
