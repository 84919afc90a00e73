"""`ChannelParallel`: modules that treat every channel, or group of channels, alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal_dtensor import Placement, Shard

from ..modules.convolution import ChannelsOfGroups, GroupedChannels
from ..modules.norm import ChannelShards
from ..sharding.module_kinds import CONVOLUTIONS, is_grouped, keeps_forward
from ..sharding.module_sharding import ModuleSharding, Port
from .style import DeclaredStyle, unsupported

_KINDS: tuple[type[nn.Module], ...] = (nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.PReLU)


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class ChannelParallel(DeclaredStyle):
    """Run what treats channels alone, between a column-wise and a row-wise convolution, on the rank's channels.

    For GroupNorm, BatchNorm, PReLU, and convolutions of several groups, depthwise ones among them.  No communication
    in either direction.  A shard of a GroupNorm or of a convolution holds complete groups: where their number is not a
    multiple of the ranks, shard the module before it alike with `.aligned(input channels of a group)`.  BatchNorm's
    statistics are sharded with its channels.

    Args:
        use_local_output: return the plain local tensor instead of a DTensor.

    Example:
        >>> ChannelParallel().sharding(nn.GroupNorm(4, 12)).parameters["weight"]
        Shard(dim=0, multiple_of=3)
    """

    use_local_output: bool = True

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if is_grouped(module):
            return sharded_groups(self, module, None, None)
        if not isinstance(module, _KINDS):
            raise unsupported("ChannelParallel", module, _KINDS, "convolutions of several groups")
        unit = self.multiple_of
        if isinstance(module, nn.GroupNorm):
            unit = module.num_channels // module.num_groups
        one_slope = isinstance(module, nn.PReLU) and module.num_parameters == 1
        names = [] if one_slope else ["weight", "bias", "running_mean", "running_var"]
        port = Port(Shard(1, multiple_of=unit), Shard(1, multiple_of=unit))
        return ModuleSharding(
            "ChannelParallel",
            {name: Shard(0, multiple_of=unit) for name in names},
            inputs=(port,),
            outputs=(port,),
            lowering=None if one_slope else ChannelShards,
            local_outputs=self.use_local_output,
        )


def sharded_groups(
    style: DeclaredStyle, module: nn.Module, arriving: Placement | None, leaving: Placement | None
) -> ModuleSharding:
    """The sharding of a convolution of several groups, by channels outside where no other layout is given.

    Args:
        style: whose name, multiple of output channels and choice of local outputs count.
        module: the convolution.
        arriving: layout of a plain input.
        leaving: layout of the output.

    Raises:
        UnsupportedModuleError: if the module has a forward of its own.
    """
    name, channels = type(style).__name__, ChannelsOfGroups.of(module, style.multiple_of)
    if not any(keeps_forward(module, kind) for kind in CONVOLUTIONS):
        raise unsupported(name, module, CONVOLUTIONS)
    return ModuleSharding(
        name,
        channels.parameters,
        inputs=(Port(arriving or channels.input, channels.input),),
        outputs=(Port(channels.output, leaving or channels.output),),
        lowering=GroupedChannels,
        options=channels,
        local_outputs=getattr(style, "use_local_output", True),
    )
