"""The seam to torch: every private or unstable torch name that this package alone uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

StorageReference = StorageWeakRef
autocasting = torch._C._is_any_autocast_enabled

# How many refer to a tensor; all of Python counts as one.
use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]  # no stub has it


# A block in which modes see calls of torch functions, inside of `unwatched_functions` too.
watching_functions: Callable[[], AbstractContextManager[object]] = torch._C._EnableTorchFunction


def traced_apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return the `apply` that compilers trace.

    A function that compilers see as one node gets the faster `apply` of shoal_dtensor.
    """
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves apply untyped


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast multiplies `tensor`; None if it leaves it alone.

    Autocast leaves float64 alone.
    """
    device = tensor.device.type
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    casts = enabled and tensor.is_floating_point() and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else None


def hook_end_of_forward(module: Any, hook: Callable[[Any, Any, Any], None] | None) -> None:
    """Register a hook that is called when a forward ends; None removes it.

    The hook also runs after an error, with None for the output.

    The hook has the same name in all modules, while torch numbers its hooks, so that compiled
    blocks of equal structure share a graph.
    """
    for table, value in (
        (module._forward_hooks, hook),
        (module._forward_hooks_always_called, True),
    ):
        table.pop("shoal", None)
        if hook is not None:
            table["shoal"] = value
