"""`RandomStates`: states of the process's default generators, which simulated ranks share."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomStates(NamedTuple):
    """States of the default generators of torch on CPU, Python and NumPy.

    Attributes:
        of_torch: state of torch's generator.
        of_python: state of the module `random`.
        of_numpy: state of NumPy's legacy generator; None where NumPy is not imported.

    Example:
        >>> states = RandomStates.capture()
        >>> first = torch.rand(1)
        >>> states.restore()
        >>> bool(torch.rand(1) == first)
        True
    """

    of_torch: Tensor
    of_python: Any
    of_numpy: Any

    @classmethod
    def capture(cls) -> RandomStates:
        """Return the present states."""
        numpy: Any = sys.modules.get("numpy")
        of_numpy = None if numpy is None else numpy.random.get_state()
        return cls(torch.get_rng_state(), random.getstate(), of_numpy)

    def restore(self) -> None:
        """Restore these states to the generators."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        if self.of_numpy is not None:
            sys.modules["numpy"].random.set_state(self.of_numpy)

    @staticmethod
    def seed(seed: int) -> None:
        """Seed all of these generators; speech models draw their masks by NumPy."""
        torch.manual_seed(seed)
        random.seed(seed)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed)
