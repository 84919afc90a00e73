"""Computations as they are defined, and by faster forms where a trial has shown the same bits.

What is defined block by block is computed by kernels that see the same shapes on any mesh. Larger calls are faster, and
most kernels add in the same order in them. So whenever shapes are new, faster forms are tried beside the definition on
random numbers, and used from then on if they have the same bits. Ranks need not choose alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from shoal_dtensor.internal import unwatched, unwatched_functions
from shoal_mesh.internal import dataclass

from .block_sums import contiguous_block

Form = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Measured:
    """A function of a number of blocks and of tensors.

    Attributes:
        definition: what it computes.
        faster: forms that may have the same bits, the fastest first.
    """

    definition: Form
    faster: tuple[Form, ...]

    def __call__(self, blocks: int, *operands: Tensor) -> Tensor:
        tensors = [contiguous_block(operand) for operand in operands]
        layouts = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        return _form(self, blocks, layouts, torch.get_num_threads())(blocks, *tensors)


@lru_cache(maxsize=4096)
def _form(
    measured: Measured, blocks: int, layouts: tuple[tuple[torch.Size, torch.dtype, torch.device], ...], _: int
) -> Form:
    """The fastest form with the bits of the definition, for operands like these and so many threads."""
    if any(device.type == "meta" for *_, device in layouts):
        return measured.definition
    # Neither random numbers nor checkpoints of the program that runs hear of a trial.
    with torch.no_grad(), unwatched_functions(), unwatched():
        draw = torch.Generator().manual_seed(0)
        operands = [torch.randn(shape, generator=draw).to(device, dtype) for shape, dtype, device in layouts]
        want = measured.definition(blocks, *operands)
        same = (form for form in measured.faster if torch.equal(form(blocks, *operands), want))
        return next(same, measured.definition)
