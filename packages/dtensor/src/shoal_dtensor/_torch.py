"""The seam to torch: every private or unstable torch name that this package uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "DataDependentError",
    "OpOverload",
    "apply",
    "decomposition_of",
    "disabled_torch_function",
    "fake_tensor",
    "faking",
    "is_view",
    "make_wrapper",
    "pytree",
    "raw",
]

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
disabled_torch_function = torch._C._disabled_torch_function_impl

DataDependentError = (DataDependentOutputException, DynamicOutputShapeException)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run an autograd function; torch leaves `Function.apply` without types."""
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch gives it no types


@cache
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


@contextmanager
def faking() -> Iterator[None]:
    """The block in which global shapes are computed: no memory, no values, and out of sight of the user's modes."""
    with _disable_current_modes(), _fake_mode():
        yield


def fake_tensor(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without memory; call it inside `faking()`."""
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)


def raw(op: OpOverload) -> Callable[..., Any]:
    """The callable under an overload: 0.3 us less per call than the overload itself."""
    return op._op


def is_view(op: OpOverload) -> bool:
    """Whether the operator's output aliases an input without writing to it."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """A function that computes the operator by others: its composite kernel or torch's decomposition, if any."""
    from torch._decomp import decomposition_table

    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return op.decompose
    return decomposition_table.get(op)
