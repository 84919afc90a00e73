"""`ChannelParallel`: modules that treat every channel, or group of channels, alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal_dtensor import Shard

from ..modules.norm import ChannelGroups
from ..sharding.module_kinds import keeps_forward
from ..sharding.module_sharding import ModuleSharding, Port
from .style import DeclaredStyle, unsupported

__all__ = ["ChannelParallel"]

_KINDS: tuple[type[nn.Module], ...] = (nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.PReLU)


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class ChannelParallel(DeclaredStyle):
    """Run a norm between a column-wise and a row-wise convolution on the channels that the rank holds.

    No communication in either direction.  A shard of a GroupNorm holds complete groups: where their number is not a
    multiple of the ranks, shard the convolutions alike with `.aligned(channels of a group)`.  BatchNorm's statistics
    are sharded with its channels.

    Args:
        use_local_output: return the plain local tensor instead of a DTensor.

    Example:
        >>> ChannelParallel().sharding(nn.GroupNorm(4, 12)).parameters["weight"]
        Shard(dim=0, multiple_of=3)
    """

    use_local_output: bool = True

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if not isinstance(module, _KINDS):
            raise unsupported("ChannelParallel", module, _KINDS)
        unit, lowering = self.multiple_of, None
        if isinstance(module, nn.GroupNorm):
            lowering = ChannelGroups if keeps_forward(module, nn.GroupNorm) else None
            unit = module.num_channels // module.num_groups
        names = ["weight", "bias", "running_mean", "running_var"]
        if isinstance(module, nn.PReLU) and module.num_parameters == 1:
            names = []
        port = Port(Shard(1), Shard(1))
        return ModuleSharding(
            "ChannelParallel",
            {name: Shard(0, multiple_of=unit) for name in names},
            inputs=(port,),
            outputs=(port,),
            lowering=lowering,
            local_outputs=self.use_local_output,
        )
