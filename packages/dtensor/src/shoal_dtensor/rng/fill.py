"""`Fill`: a distribution and its parameters, as data.

Every random operator is in the end an in-place fill of fresh memory, so a fill is all that the streams need to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .state import generator_of


@dataclass(frozen=True, slots=True)
class Fill:
    """One of torch's in-place random methods with its arguments.

    Attributes:
        name: the method: `uniform_`, `normal_`, `bernoulli_`, `exponential_`, `cauchy_`, `geometric_`, `log_normal_`
            or `random_`; or `dropout_mask`, what the device's dropout kernel keeps, with arguments (chance to drop,
            dtype of the input).
        args: its arguments before `generator`.
        granule: the kernel may differ by the number of elements modulo this.

    Example:
        >>> target = torch.empty(3, dtype=torch.int64)
        >>> Fill("random_", (0, 6))(target); bool(target.lt(6).all())
        True
    """

    name: str
    args: tuple[Any, ...] = ()
    granule: int = 1

    def __call__(self, target: Tensor, generator: torch.Generator | None = None, operand: Tensor | None = None) -> None:
        """Fill `target` in place.

        Args:
            target: a plain tensor.
            generator: where numbers come from; the device's default generator when left out.
            operand: for `bernoulli_`, a probability for every element.
        """
        if self.name == "dropout_mask":
            chance, dtype = self.args
            _dropout_mask(target, chance, dtype, generator)
            return
        args = self.args if operand is None else (operand, *self.args)
        getattr(target, self.name)(*args, generator=generator)


def _dropout_mask(mask: Tensor, chance: float, dtype: torch.dtype, generator: torch.Generator | None) -> None:
    """What `native_dropout` keeps of a tensor like `mask`; it takes no generator, so another one is lent its place."""
    source = torch.ones(mask.shape, dtype=dtype, device=mask.device)
    default = generator_of(mask.device)
    if generator is None or generator is default:
        mask.copy_(torch.native_dropout(source, chance, train=True)[1])
        return
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        mask.copy_(torch.native_dropout(source, chance, train=True)[1])
        generator.set_state(default.get_state())
    finally:
        default.set_state(before)
