"""Modes that see functions and operators: selective checkpointing, and attention that is another function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = ["ReplacedAttention", "TorchDispatchMode", "dispatch_modes", "selectively_checkpointed", "unwatched"]

# Number of dispatch modes that are active.
dispatch_modes = torch._C._len_torch_dispatch_stack


def _is_selective(mode: object) -> bool:
    return isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode)


def selectively_checkpointed() -> bool:
    """Whether selective activation checkpointing watches: what it saves must not be written to afterwards."""
    return dispatch_modes() > 0 and any(map(_is_selective, _get_current_dispatch_mode_stack()))


def unwatched() -> AbstractContextManager[object]:
    """A block whose operators selective activation checkpointing does not see, so that it saves none of their results.

    For collectives on fresh results: they are run again in the recomputation.
    """
    return _disable_current_modes() if selectively_checkpointed() else nullcontext()


class ReplacedAttention(TorchFunctionMode):
    """Inside, `F.scaled_dot_product_attention` is another function of the same arguments."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
