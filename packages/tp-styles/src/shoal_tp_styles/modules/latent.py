"""Projections to a latent of which every rank's heads read some features by themselves.

x: R, W: R -> y: R        every rank computes the same; the gradient of the last features is summed over the ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import DTensor

from ..lowering.boundary import local_input
from ..lowering.collective_functions import copy
from ..lowering.lowered import Lowered
from ..sharding.collective import Collective
from ..sharding.module_sharding import LatentFeatures, ModuleCall


class LatentLinear(Lowered):
    """A Linear of multi-head latent attention: the latent, then features that each head reads (of rotary positions)."""

    __slots__ = ()

    @property
    def rotary(self) -> int:
        """Number of features that heads read by themselves."""
        assert isinstance(self.sharding.options, LatentFeatures), "the style declared them"
        return self.sharding.options.rotary

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        options, out = call.sharding.options, call.output
        assert isinstance(options, LatentFeatures), "the style declared them"
        if out.requires_grad:
            read = out.numel() // out.shape[-1] * options.rotary
            yield Collective("all_reduce", read * out.element_size(), backward=True)

    def __call__(self, input: Tensor) -> Tensor:
        x = input
        if isinstance(input, DTensor):
            x = local_input(input, self.port_in, self.mesh, grad=self.port_in.desired)
        local: Any = self.local("weight", "bias")
        out = functional.linear(x, local["weight"], local["bias"])
        latent, read = out.split([out.shape[-1] - self.rotary, self.rotary], -1)  # type: ignore[no-untyped-call]  # torch
        return torch.cat([latent, copy(read, self.comm)], -1)
