"""The seam to torch: every private or unstable torch name that this package alone uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

StorageReference = StorageWeakRef
autocasting = torch._C._is_any_autocast_enabled

# The number of references to a tensor; all references from Python together count as one.
use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]  # no stub


# Opens a block in which function modes see calls of torch functions, even if the block is inside
# of `unwatched_functions`.
watching_functions: Callable[[], AbstractContextManager[object]] = torch._C._EnableTorchFunction


def traced_apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call an autograd function through torch's own `apply`, which compilers can trace.

    Functions that compilers see as one node use the faster `apply` of shoal_dtensor.
    """
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves apply untyped


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast multiplies `tensor`; None if it keeps its dtype.

    Autocast never converts float64.
    """
    device = tensor.device.type
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    casts = enabled and tensor.is_floating_point() and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else None


# The key of shoal's hooks in torch's tables of hooks is the same for all modules. Torch's own keys
# are numbers that differ between modules, and compiled blocks of equal structure would not share a
# graph.
_HOOK_KEY = "shoal"


def hook_end_of_forward(module: Any, hook: Callable[[Any, Any, Any], None]) -> None:
    """Register a hook that is called when a forward ends, instead of the earlier one.

    The hook also runs after an error, with None for the output.
    """
    unhook_end_of_forward(module)
    module._forward_hooks[_HOOK_KEY] = hook
    module._forward_hooks_always_called[_HOOK_KEY] = True


def unhook_end_of_forward(module: Any) -> None:
    """Remove the hook of `hook_end_of_forward`, if there is one."""
    module._forward_hooks.pop(_HOOK_KEY, None)
    module._forward_hooks_always_called.pop(_HOOK_KEY, None)


def hook_start_of_forward(
    module: Any, hook: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]
) -> None:
    """Register a hook that is called before a forward with its arguments, instead of the earlier.

    A `module` has at most one such hook.
    """
    unhook_start_of_forward(module)
    module._forward_pre_hooks[_HOOK_KEY] = hook
    module._forward_pre_hooks_with_kwargs[_HOOK_KEY] = True


def unhook_start_of_forward(module: Any) -> None:
    """Remove the hook of `hook_start_of_forward`, if there is one."""
    module._forward_pre_hooks.pop(_HOOK_KEY, None)
    module._forward_pre_hooks_with_kwargs.pop(_HOOK_KEY, None)
