"""GroupNorm on the groups of channels that the rank holds.

x: S(channels), W: S(0), b: S(0) -> y: S(channels), no communication.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from ..errors import LayoutError
from .boundary import arrive_local, leave
from .enter import enter
from .forward import Lowered

__all__ = ["ChannelGroups"]


class ChannelGroups(Lowered):
    """Stand-in for a GroupNorm whose groups are cut."""

    __slots__ = ("ends",)

    def resolve(self) -> None:
        module: Any = self.module
        size = module.num_channels // module.num_groups
        share = -(-module.num_groups // self.comm.size) * size
        self.ends = [min(module.num_channels, rank * share) for rank in range(self.comm.size + 1)]

    def __call__(self, input: Tensor) -> Tensor:
        module: Any = self.module
        port = self.port_in
        if type(input) is not Tensor:
            input = arrive_local(input, port, self.mesh, grad=port.desired)
        first, last = self.ends[self.comm.rank : self.comm.rank + 2]
        if input.shape[1] != last - first:
            raise LayoutError(
                f"ChannelParallel: {module} holds the channels {first} to {last} here, cut at groups, but "
                f"{input.shape[1]} arrived; cut the convolution before it by ColwiseParallel().aligned("
                f"{module.num_channels // module.num_groups})"
            )
        local: Any = enter({"weight": self.params["weight"], "bias": self.params["bias"]})
        groups = (last - first) * module.num_groups // module.num_channels
        # Kernels refuse no groups; no channels as one group are what they are, and their gradients are none.
        out = functional.group_norm(input, max(1, groups), local["weight"], local["bias"], module.eps)
        if self.sharding.local_outputs:
            return out
        shape = (out.shape[0], module.num_channels, *out.shape[2:])
        return leave(out, self.port_out, self.mesh, shape)
