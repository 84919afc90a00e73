"""Dropout on this rank's shard of the sequence.

While it is active it draws as a DTensor: the values that one device with the full sequence would draw.  Otherwise it
returns its input.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal_dtensor import DTensor

from ..lowering.boundary import Boundary


class SequenceDropout(Boundary):
    """A Dropout under `SequenceParallel`."""

    __slots__ = ()
    one_axis = True

    def __call__(self, input: Tensor) -> Any:
        module: Any = self.module
        idle = not module.training or module.p == 0
        if idle and self.sharding.local_outputs and not isinstance(input, DTensor):
            return input
        return super().__call__(input)
