"""The seam to torch: every private or unstable torch name that this package uses."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "apply",
    "autocast_dtype",
    "autocasting",
    "direct",
    "is_compiling",
    "pieces",
    "transforming",
    "will_run",
]

is_compiling = torch.compiler.is_compiling

autocasting = torch._C._is_any_autocast_enabled


transforming = torch._C._are_functorch_transforms_active

# Whether the backward pass in progress will run an autograd node; RuntimeError for a leaf of torch.autograd.grad.
will_run = torch._C._will_engine_execute_node


def direct(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without the look for functorch's wrappers, for callers that know that no transform is active."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]  # defined in C


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, which torch leaves untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves apply untyped


def pieces(tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """`tensor.split` along dim 0, which torch leaves untyped."""
    return list(torch.split_with_sizes(tensor, sizes))


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype in which autocast runs matrix products of `tensor`; None where it leaves them alone.

    As autocast itself: only floating tensors on the autocast device, and never float64.
    """
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)
