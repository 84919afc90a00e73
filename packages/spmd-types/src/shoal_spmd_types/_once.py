"""`computed_once`: the constants of an emitted program, computed at the first call.

May import: nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from shoal_dtensor.internal import dispatch_modes

T = TypeVar("T")


def computed_once(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function that computes its result at the first call, and returns it at each call.

    Programs of `emit` keep the tensors that depend on sizes and numbers alone this way, one result
    for each device. Do not write to them. The function runs at every call under a dispatch mode
    (the checker, tensors without memory), under a compiler and in the capture of a CUDA graph:
    there its tensors belong to one run.

    Args:
        function: computes tensors, from nothing but sizes and numbers.

    Example:
        >>> @computed_once
        ... def constants():
        ...     return torch.ones(2, 2).tril()
        >>> constants() is constants()
        True
    """
    # index of an accelerator, or None for a machine without one -> the result
    results: dict[int | None, T] = {}

    @functools.wraps(function)
    def compute_or_return() -> T:
        if _belongs_to_one_run():
            return function()
        has_accelerator = torch.accelerator.is_available()
        device = torch.accelerator.current_device_index() if has_accelerator else None
        if device not in results:
            # Autograd cannot save tensors that are made in inference mode.
            with torch.inference_mode(mode=False):
                results[device] = function()
            if has_accelerator:
                # Later calls may be on other streams.
                torch.accelerator.synchronize()
        return results[device]

    return compute_or_return


def _belongs_to_one_run() -> bool:
    """Return whether tensors that are made now may not be used in another forward."""
    if torch.compiler.is_compiling() or dispatch_modes():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
