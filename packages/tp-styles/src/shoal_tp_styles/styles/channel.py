"""`ChannelParallel`: modules that treat every channel, or group of channels, alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal_dtensor import Placement, Shard

from ..modules.channels import ChannelsOfGroups, GroupedChannels
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
        if not is_grouped(module) and not isinstance(module, _KINDS):
            raise unsupported("ChannelParallel", module, _KINDS, "convolutions of several groups")
        if not isinstance(module, nn.PReLU) or module.num_parameters > 1:
            return sharded_groups(self, module, None, None)
        port = Port(Shard(1, multiple_of=self.multiple_of), Shard(1, multiple_of=self.multiple_of))
        return ModuleSharding(  # one slope for all channels
            "ChannelParallel", inputs=(port,), outputs=(port,), local_outputs=self.use_local_output
        )


def sharded_groups(
    style: DeclaredStyle, module: nn.Module, arriving: Placement | None, leaving: Placement | None
) -> ModuleSharding:
    """The sharding of a module by groups of channels, by channels outside where no other layout is given.

    The style's name, multiple of output channels and choice of local outputs count.  A convolution with a forward of
    its own is an UnsupportedModuleError.
    """
    name, channels = type(style).__name__, ChannelsOfGroups.of(module, style.multiple_of)
    if isinstance(module, CONVOLUTIONS) and not any(keeps_forward(module, kind) for kind in CONVOLUTIONS):
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
