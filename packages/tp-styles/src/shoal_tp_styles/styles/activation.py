"""Styles of what treats parts of an activation alone: `SequenceParallel` every token, `ChannelParallel` every channel.

`ContextParallel` is for attention of a sharded sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from shoal_context_parallel import Documents, SequenceLayout
from shoal_context_parallel.internal import ContextOptions, Method
from shoal_dtensor import Placement, Shard

from ..lowering.lowered import Lowered
from ..modules.channels import ChannelsOfGroups, GroupedChannels
from ..modules.own_forward import TOKENWISE, ContextAttention, SequenceDropout, Tokenwise, is_norm
from ..modules.recurrent import RECURRENT, Recurrent
from ..sharding.module_kinds import CONVOLUTIONS, class_of, is_grouped, keeps_forward
from ..sharding.module_sharding import ModuleSharding, Port
from .style import DeclaredStyle, unsupported

# By exact type: a subclass may treat tokens otherwise.
_LOWERINGS: dict[type[nn.Module], type[Lowered]] = {
    **dict.fromkeys(TOKENWISE, Tokenwise),
    **dict.fromkeys(RECURRENT, Recurrent),
    nn.Dropout: SequenceDropout,
}


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class SequenceParallel(DeclaredStyle):
    """Run a module that treats every token alone on each rank's shard of the sequence.

    For LayerNorm, RMSNorm, Dropout, activations and modules of your own of that kind; RNN, LSTM and GRU along their
    batch dim.  A plain input is this rank's shard of the sequence; a DTensor is redistributed to it.  The gradients of
    the replicated parameters are summed over the axis before hooks and optimizers see them.

    Args:
        sequence_dim: the dim of the activations that is sharded.
        use_local_output: return the plain local tensor instead of a DTensor.

    Example:
        >>> from torch import nn
        >>> SequenceParallel().sharding(nn.LayerNorm(8)).placements("weight", (4,))
        (Replicate(),)
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    @property
    def sequence_sharding(self) -> tuple[Placement, ...]:
        """`Shard(sequence_dim)` in torch's form; assigning it sets `sequence_dim`."""
        return (Shard(self.sequence_dim),)

    @sequence_sharding.setter
    def sequence_sharding(self, value: tuple[Shard, ...]) -> None:
        (sharding,) = value
        self.sequence_dim = sharding.dim

    def sharding(self, module: nn.Module) -> ModuleSharding:
        port = Port(Shard(self.sequence_dim), Shard(self.sequence_dim))
        return ModuleSharding(
            "SequenceParallel",
            inputs=(port,),
            outputs=(port,),
            lowering=_LOWERINGS.get(class_of(module)) or (Tokenwise if is_norm(module) else None),
            local_outputs=self.use_local_output,
        )


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class ContextParallel(DeclaredStyle):
    """Let calls of `F.scaled_dot_product_attention` in a module be those of the sequence over all ranks of the axis.

    For a module of any kind: an attention, a block, a whole model. Its inputs are this rank's positions. Parameters
    stay as they are; their gradients are those of this rank's positions, and are reduced as over data ranks
    (`replicate`, `fully_shard`). Other styles on the same module or inside of it use other axes.
    A checkpoint goes around the module, not inside of it: what runs again in backward has to pass through its forward.

    Args:
        method: how keys and values reach the queries, see `context_parallel_attention`.
        layout: which positions each rank holds. A name is for sequences of which all ranks hold equally many.
        window: (left, right): keys before and behind the query's own position that it may read; None: no bound.
        documents: of packed sequences that are the same in every batch; else use `context_parallel`.

    Example:
        >>> ContextParallel(method="ring", layout="head_tail").on("context").axis
        'context'
    """

    method: Method = "ring"
    layout: SequenceLayout | Literal["contiguous", "head_tail"] = "contiguous"
    window: tuple[int | None, int | None] = (None, None)
    documents: Documents | None = None

    def sharding(self, module: nn.Module) -> ModuleSharding:
        return ModuleSharding(
            "ContextParallel",
            lowering=ContextAttention,
            options=ContextOptions(self.method, self.layout, self.window, self.documents),
            distributes=False,
        )


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
    """The sharding of a module by groups of channels, by channels outside where no other layout is given."""
    name, channels = type(style).__name__, ChannelsOfGroups.of(module, style.multiple_of)
    if isinstance(module, CONVOLUTIONS) and not any(keeps_forward(module, kind) for kind in CONVOLUTIONS):
        raise unsupported(name, module, CONVOLUTIONS)
    # In units of 2 groups of 1 input and 2 output channels: multiples of 2 and of 4.
    into, out_of, rows = (channels.unit * size for size in (channels.into, channels.out_of, channels.rows))
    reads, computes = Shard(channels.dim, multiple_of=into), Shard(channels.dim, multiple_of=out_of)
    of_outputs = dict.fromkeys(("bias", "running_mean", "running_var"), Shard(0, multiple_of=out_of))
    return ModuleSharding(
        name,
        {"weight": Shard(0, multiple_of=rows), **of_outputs},
        inputs=(Port(arriving or reads, reads),),
        outputs=(Port(computes, leaving or computes),),
        lowering=GroupedChannels,
        options=channels,
        local_outputs=getattr(style, "use_local_output", True),
    )
