"""Styles for modules that compute parts of an activation independently of its other parts.

The parts are tokens, channels or attention heads.

`ContextParallel` is for attention over a sharded sequence. The other styles are for modules between
column-wise and row-wise projections, except `HeadParallel`, which shards its own projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from shoal_context_parallel import Documents, SequenceLayout
from shoal_context_parallel.internal import ContextOptions, Method
from shoal_dtensor import Partial, Placement, Replicate, Shard
from shoal_dtensor.errors import LayoutError, UnsupportedModuleError

from ..lowering.lowered import Lowered
from ..modules.channels import ChannelsOfGroups, GroupedChannels
from ..modules.composed_linear import OWN_PROJECTIONS, AttentionHeads, LatentLinear
from ..modules.own_forward import (
    TOKENWISE,
    ContextAttention,
    LocalForward,
    SequenceDropout,
    Tokenwise,
    is_norm,
)
from ..modules.recurrent import RECURRENT, Recurrent
from ..sharding.module_kinds import CONVOLUTIONS, class_of, is_grouped, keeps_forward
from ..sharding.module_sharding import (
    FusedBlocks,
    Heads,
    HeadShard,
    LatentFeatures,
    ModuleSharding,
    ParameterPlacement,
    Port,
)
from .style import DeclaredStyle, check_forward, unsupported_error

# For each type of module the forward that the style puts in its place, on local shards. Subclasses
# are not looked up: they may compute with several tokens together.
_LOWERINGS: dict[type[nn.Module], type[Lowered]] = {
    **dict.fromkeys(TOKENWISE, Tokenwise),
    **dict.fromkeys(RECURRENT, Recurrent),
    nn.Dropout: SequenceDropout,
}


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class SequenceParallel(DeclaredStyle):
    """Style that runs a module on each rank's shard of the sequence.

    The module must compute each token independently of the other tokens. The style is for
    LayerNorm, RMSNorm, Dropout, activations and your own modules of this kind, and for RNN, LSTM
    and GRU along their batch dim. A plain input is this rank's shard of the sequence; a DTensor is
    redistributed to it. The gradients of the replicated parameters are summed over the axis before
    hooks and optimizers see them.

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
        """The tuple `(Shard(sequence_dim),)`, as in torch; assigning it sets `sequence_dim`."""
        return (Shard(self.sequence_dim),)

    @sequence_sharding.setter
    def sequence_sharding(self, value: tuple[Shard, ...]) -> None:
        (sharding,) = value
        self.sequence_dim = sharding.dim

    def sharding(self, module: nn.Module) -> ModuleSharding:
        # Inputs arrive sharded along the sequence, and outputs leave so.
        port = Port(layout=Shard(self.sequence_dim), desired=Shard(self.sequence_dim))
        lowering = _LOWERINGS.get(class_of(module))
        if lowering is None and is_norm(module):
            lowering = Tokenwise
        return ModuleSharding(
            "SequenceParallel",
            inputs=(port,),
            outputs=(port,),
            lowering=lowering,
            local_outputs=self.use_local_output,
        )


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class ContextParallel(DeclaredStyle):
    """Style for scaled dot-product attention over the sequence of all ranks of the axis.

    It replaces calls of `F.scaled_dot_product_attention` in a module.

    The style is for a module of any kind: an attention, a block, a whole model. The inputs of the
    module are this rank's positions. Parameters stay as they are. Their gradients are the gradients
    of this rank's positions; `replicate` or `fully_shard` over the axis reduces them, as over data
    ranks. Other styles on the same module or inside it use other axes. An activation checkpoint
    goes around the module, not inside it: the recomputation in backward must call the forward of
    the module, which replaces the attention.

    Args:
        method: how keys and values reach the queries, see `context_parallel_attention`.
        layout: which positions each rank holds. A name is for sequences of which all ranks hold
            equally many positions.
        window: (left, right), the numbers of keys before and after its own position that a query
            reads; None for no bound.
        documents: documents of packed sequences that are the same in every batch; else use
            `context_parallel`.

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
            # parameters stay plain tensors
            distributes=False,
        )


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class HeadParallel(DeclaredStyle):
    """Style that gives each rank some heads of an `nn.MultiheadAttention`.

    The input projections are sharded by columns, the output projection by rows.

    Query, key and value arrive replicated; the output leaves replicated (or sharded, by
    `output_layouts`), after one reduction. The fused `in_proj_weight` stays one parameter; a rank
    holds the rows of its heads from each of the three blocks, or from the three weights if `kdim`
    or `vdim` are given.

    Args:
        output_layouts: layout of the output; Replicate if left out.

    Example:
        >>> HeadParallel().sharding(nn.MultiheadAttention(8, 4)).fused.blocks["q"]
        Heads(count=4, size=2)
    """

    output_layouts: Placement | None = None

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if not isinstance(module, nn.MultiheadAttention):
            raise unsupported_error("HeadParallel", module, (nn.MultiheadAttention,))
        if module.bias_k is not None or module.add_zero_attn:
            raise UnsupportedModuleError(
                "HeadParallel: bias_k/bias_v and add_zero_attn are not supported; distribute the "
                "module with shoal_dtensor.distribute_module"
            )
        # The style does not call the module's forward, so a subclass must not override it.
        check_forward("HeadParallel", module, nn.MultiheadAttention)
        heads = Heads(module.num_heads, module.head_dim)
        parameters: dict[str, ParameterPlacement] = {"out_proj.weight": HeadShard(1, heads)}
        if not module._qkv_same_embed_dim:
            # There are separate weights where keys or values have dims of their own.
            parameters |= dict.fromkeys(OWN_PROJECTIONS, HeadShard(0, heads))
        port = Port(Replicate(), Replicate())
        output = Port(Partial(), self.output_layouts or Replicate())
        blocks = dict.fromkeys("qkv", heads)
        return ModuleSharding(
            "HeadParallel",
            parameters,
            inputs=(port, port, port),
            # The second output, the attention weights, passes through.
            outputs=(output, None),
            lowering=AttentionHeads,
            options=FusedBlocks(blocks, prefix="in_proj_"),
        )


@dataclass(kw_only=True, repr=False)
class OwnParameters(DeclaredStyle):
    """Style that shards parameters of a module's own forward, such as one attention sink per head.

    The forward runs on local shards. Children keep styles of their own. A parameter that is not
    named is replicated. Its gradient is used as each rank computes it and not reduced over the
    axis, so each rank must compute the whole gradient.

    Args:
        dims: name of a parameter -> the dim that is sharded; a parameter that is None is not
            sharded.
        counts: names of integer attributes of the module, such as the number of heads or the
            features of all heads. The forward reshapes outputs of column-wise children by them.
            While the forward runs, each attribute has this rank's part: 2 of 8 heads on 4 ranks.

    Raises:
        LayoutError: if the module has no such parameter or integer, or the parameter no such dim,
            or the ranks do not share a count equally (when applied).

    Example:
        >>> import torch
        >>> class Attention(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.sinks = nn.Parameter(torch.zeros(8))
        >>> OwnParameters(dims={"sinks": 0}).sharding(Attention()).parameters
        {'sinks': Shard(dim=0)}
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    counts: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.dims.items()), self.counts, self.axis))

    def sharding(self, module: nn.Module) -> ModuleSharding:
        placements = {}
        for name, dim in self.dims.items():
            # An attribute that is None is a parameter that this layer does not use.
            is_unused = hasattr(module, name) and getattr(module, name) is None
            if is_unused:
                continue
            dim = self._sharded_dim(module, name, dim)
            placements[name] = Shard(dim, multiple_of=self.multiple_of)
        for name in self.counts:
            if type(vars(module).get(name)) is not int:
                raise LayoutError(
                    f"OwnParameters: {type(module).__name__} does not have an integer attribute "
                    f"{name!r}"
                )
        counts = tuple(self.counts)
        return ModuleSharding(
            "OwnParameters", placements, lowering=LocalForward, options=counts, own_parameters=True
        )

    def _sharded_dim(self, module: nn.Module, name: str, dim: int) -> int:
        """Return a dim of a parameter, counted from the first; raise if there is no such dim."""
        param = module._parameters.get(name)
        if param is not None:
            # The dim -2, the rows of a weight, is also allowed for a bias of one dim, whose
            # elements belong to the rows: both -1 and -2 are its dim 0.
            least_dim = -max(param.ndim, 2)
            if least_dim <= dim < param.ndim:
                return max(dim + param.ndim, 0) if dim < 0 else dim
        got = "no such parameter" if param is None else f"one of shape {tuple(param.shape)}"
        raise LayoutError(
            f"OwnParameters: dim {dim} of {name!r}: {type(module).__name__} has {got}"
        )


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class LatentProjection(DeclaredStyle):
    """Style for a replicated Linear of multi-head latent attention.

    The output of the Linear has two parts: the latent, from which a column-wise projection computes
    the keys and values of the heads, and the last features, which carry rotary positions and which
    all heads read directly. Each rank computes some of the heads, so each rank has an addend of the
    gradient of the output. The column-wise projection adds the gradients of the latent over the
    ranks. This style adds the gradients of the last features.

    Args:
        rotary: the number of last features of the output, which the heads read directly.

    Raises:
        LayoutError: if the module has fewer features (when applied).

    Example:
        >>> LatentProjection(rotary=4).sharding(nn.Linear(16, 12)).options.rotary
        4
    """

    rotary: int

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if not isinstance(module, nn.Linear) or not keeps_forward(module, nn.Linear):
            raise unsupported_error("LatentProjection", module, (nn.Linear,))
        if not 0 <= self.rotary <= module.out_features:
            raise LayoutError(f"LatentProjection: {module} does not have {self.rotary} features")
        port = Port(Replicate(), Replicate())
        return ModuleSharding(
            "LatentProjection",
            inputs=(port,),
            outputs=(port,),
            lowering=LatentLinear,
            options=LatentFeatures(self.rotary),
        )


_KINDS: tuple[type[nn.Module], ...] = (
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.PReLU,
)


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class ChannelParallel(DeclaredStyle):
    """Style that runs a module on the rank's channels.

    The module must compute groups of channels independently of the other groups. It is between a
    column-wise and a row-wise convolution.

    The style is for GroupNorm, BatchNorm, PReLU, and convolutions of several groups, including
    depthwise ones. It runs no communication in either direction. A shard of a GroupNorm or of a
    convolution holds complete groups. If the number of groups is not a multiple of the number of
    ranks, give the module before it the same boundaries: for groups of 3 input channels, by
    `.aligned(3)` on the style of that module. BatchNorm's statistics are sharded with its channels.

    Args:
        use_local_output: return the plain local tensor instead of a DTensor.

    Example:
        >>> ChannelParallel().sharding(nn.GroupNorm(4, 12)).parameters["weight"]
        Shard(dim=0, multiple_of=3)
    """

    use_local_output: bool = True

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if not is_grouped(module) and not isinstance(module, _KINDS):
            raise unsupported_error(
                "ChannelParallel", module, _KINDS, "convolutions with several groups"
            )
        has_one_slope = isinstance(module, nn.PReLU) and module.num_parameters == 1
        if not has_one_slope:
            return sharded_groups(self, module, input_layout=None, output_layout=None)
        layout = Shard(1, multiple_of=self.multiple_of)
        port = Port(layout, layout)
        return ModuleSharding(
            "ChannelParallel", inputs=(port,), outputs=(port,), local_outputs=self.use_local_output
        )


def sharded_groups(
    style: DeclaredStyle,
    module: nn.Module,
    input_layout: Placement | None,
    output_layout: Placement | None,
) -> ModuleSharding:
    """Return the sharding of a module by groups of channels.

    Args:
        style: the style of the module.
        module: the module.
        input_layout: the layout in which the input arrives; None if it is sharded by channels.
        output_layout: the layout in which the output leaves; None if it is sharded by channels.
    """
    name = type(style).__name__
    if isinstance(module, CONVOLUTIONS):
        has_own_forward = not any(keeps_forward(module, cls) for cls in CONVOLUTIONS)
        if has_own_forward:
            raise unsupported_error(name, module, CONVOLUTIONS)
    channels = ChannelsOfGroups.of(module, style.multiple_of)
    # A group reads `into` input channels, computes `out_of` output channels, and has `rows` rows of
    # the weight. Ranks hold multiples of `unit` groups. Example: units of 2 groups, with 1 input
    # and 2 output channels in a group; the ranks read multiples of 2 channels, and compute
    # multiples of 4.
    reads = Shard(channels.dim, multiple_of=channels.unit * channels.into)
    computes = Shard(channels.dim, multiple_of=channels.unit * channels.out_of)
    per_output = Shard(0, multiple_of=channels.unit * channels.out_of)
    parameters = {
        "weight": Shard(0, multiple_of=channels.unit * channels.rows),
        "bias": per_output,
        "running_mean": per_output,
        "running_var": per_output,
    }
    input_port = Port(input_layout or reads, reads)
    output_port = Port(computes, output_layout or computes)
    return ModuleSharding(
        name,
        parameters,
        inputs=(input_port,),
        outputs=(output_port,),
        lowering=GroupedChannels,
        options=channels,
        # styles without this option return plain tensors
        local_outputs=getattr(style, "use_local_output", True),
    )
