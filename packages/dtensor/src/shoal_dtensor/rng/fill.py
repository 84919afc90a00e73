"""`Fill`: a distribution and its parameters, as data.

Every random operator is in the end an in-place fill of fresh memory, so a fill is all that the streams need to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Fill"]


@dataclass(frozen=True, slots=True)
class Fill:
    """One of torch's in-place random methods with its arguments.

    Attributes:
        name: the method: `uniform_`, `normal_`, `bernoulli_`, `exponential_`, `cauchy_`, `geometric_`, `log_normal_`
            or `random_`.
        args: its arguments before `generator`; for `bernoulli_` none when probabilities come as an operand.

    Example:
        >>> Fill("random_", (0, 6))(torch.empty(3, dtype=torch.int64)).lt(6).all()
        tensor(True)
    """

    name: str
    args: tuple[Any, ...] = ()

    def __call__(
        self, target: Tensor, generator: torch.Generator | None = None, operand: Tensor | None = None
    ) -> Tensor:
        """Fill `target` in place.

        Args:
            target: a plain tensor.
            generator: where numbers come from; the device's default generator when left out.
            operand: for `bernoulli_`, a probability for every element.
        """
        method = getattr(target, self.name)
        args = self.args if operand is None else (operand, *self.args)
        filled: Tensor = method(*args, generator=generator)
        return filled
