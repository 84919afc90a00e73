"""Dropout on the rank's own part of the sequence.

While it drops, it draws as a DTensor: the values that one device with the whole sequence would draw.  Where it drops
nothing it does nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal_dtensor import DTensor

from .boundary import Boundary

__all__ = ["SequenceDropout"]


class SequenceDropout(Boundary):
    """Stand-in for a Dropout under `SequenceParallel`."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Any:
        module: Any = self.module
        idle = not module.training or module.p == 0
        if idle and self.sharding.local_outputs and not isinstance(input, DTensor):
            return input
        return super().__call__(input)
