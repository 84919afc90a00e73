"""The seam to torch: every private or unstable torch name that this package uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

__all__ = [
    "DataDependentError",
    "OpOverload",
    "decomposition_of",
    "disabled_torch_function",
    "fake_mode",
    "fake_tensor",
    "is_view",
    "make_wrapper",
    "raw",
]

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
disabled_torch_function = torch._C._disabled_torch_function_impl

DataDependentError = (DataDependentOutputException, DynamicOutputShapeException)


@cache
def fake_mode() -> FakeTensorMode:
    """The mode in which global shapes are computed: no memory, no values."""
    return FakeTensorMode()


def fake_tensor(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without memory; call it inside `fake_mode()`."""
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)


def raw(op: OpOverload) -> Callable[..., Any]:
    """The callable under an overload: 0.3 us less per call than the overload itself."""
    return cast("Callable[..., Any]", op._op)


def is_view(op: OpOverload) -> bool:
    """Whether the operator's output aliases an input without writing to it."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """A function that computes the operator by others: its composite kernel or torch's decomposition; None without one."""
    from torch._decomp import decomposition_table

    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return op.decompose
    found = decomposition_table.get(op)
    return cast("Callable[..., Any] | None", found)
