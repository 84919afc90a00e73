"""`HeadParallel`, `OwnParameters` and `LatentProjection`: attention, beside column-wise and row-wise projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from shoal_dtensor import Partial, Placement, Replicate, Shard
from shoal_dtensor.errors import LayoutError, UnsupportedModuleError

from ..modules.composed_linear import OWN_PROJECTIONS, AttentionHeads, LatentLinear
from ..modules.own_forward import LocalForward
from ..sharding.module_kinds import keeps_forward
from ..sharding.module_sharding import FusedBlocks, Heads, HeadShard, LatentFeatures, ModuleSharding, Port
from .style import DeclaredStyle, check_forward, unsupported


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class HeadParallel(DeclaredStyle):
    """Give each rank some heads of an `nn.MultiheadAttention`: projections by columns, the output projection by rows.

    Query, key and value arrive replicated; the output leaves replicated (or sharded, by `output_layouts`), after one
    reduction.  The fused `in_proj_weight` stays one parameter; of each of its three blocks a rank holds the rows of its
    heads, as of the three weights where `kdim` or `vdim` are given.

    Args:
        output_layouts: layout of the output; Replicate if left out.

    Example:
        >>> HeadParallel().sharding(nn.MultiheadAttention(8, 4)).fused.blocks["q"]
        Heads(count=4, size=2)
    """

    output_layouts: Placement | None = None

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if not isinstance(module, nn.MultiheadAttention):
            raise unsupported("HeadParallel", module, (nn.MultiheadAttention,))
        if module.bias_k is not None or module.add_zero_attn:
            raise UnsupportedModuleError(
                "HeadParallel: bias_k/bias_v and add_zero_attn are not supported; distribute the module with "
                "shoal_dtensor.distribute_module"
            )
        check_forward("HeadParallel", module, nn.MultiheadAttention)
        heads = Heads(module.num_heads, module.head_dim)
        # One weight each where keys or values have dims of their own.
        projections = () if module._qkv_same_embed_dim else OWN_PROJECTIONS
        port = Port(Replicate(), Replicate())
        return ModuleSharding(
            "HeadParallel",
            {"out_proj.weight": HeadShard(1, heads)} | dict.fromkeys(projections, HeadShard(0, heads)),
            inputs=(port, port, port),
            outputs=(Port(Partial(), self.output_layouts or Replicate()), None),
            lowering=AttentionHeads,
            options=FusedBlocks(dict.fromkeys("qkv", heads), prefix="in_proj_"),
        )


@dataclass(kw_only=True, repr=False)
class OwnParameters(DeclaredStyle):
    """Shard the parameters that a module's own forward reads, such as one attention sink per head.

    The forward runs on local shards. Children keep styles of their own. A parameter that is not named is replicated,
    and its gradient is taken to be the same on all ranks.

    Args:
        dims: name of a parameter -> the dim that is sharded; a module where it is None has nothing to shard.
        counts: names of integers of the module by which its forward reshapes what column-wise children return: numbers
            of heads, features of all heads. While the forward runs, a rank reads its part of them.

    Raises:
        LayoutError: if the module has no such parameter or integer, or the parameter no such dim, or the ranks do not
            share a count equally (when applied).

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
            if getattr(module, name, 0) is None:
                continue  # this layer has none
            param = module._parameters.get(name)
            if param is None or not -max(param.ndim, 2) <= dim < param.ndim:
                got = "no such parameter" if param is None else f"one of shape {tuple(param.shape)}"
                raise LayoutError(f"OwnParameters: dim {dim} of {name!r}: {type(module).__name__} has {got}")
            placements[name] = Shard(max(dim + param.ndim, 0) if dim < 0 else dim, multiple_of=self.multiple_of)
        for name in self.counts:
            if type(vars(module).get(name)) is not int:
                raise LayoutError(f"OwnParameters: {name!r} is no integer of {type(module).__name__}")
        counts = tuple(self.counts)
        return ModuleSharding("OwnParameters", placements, lowering=LocalForward, options=counts, own_parameters=True)


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class LatentProjection(DeclaredStyle):
    """A replicated Linear of multi-head latent attention, whose last features each rank's heads read by themselves.

    The latent passes a column-wise projection, which sums its gradient over the ranks; this style sums that of the
    features beside it.

    Args:
        rotary: number of these features, the last of the output.

    Raises:
        LayoutError: if the module has fewer features (when applied).

    Example:
        >>> LatentProjection(rotary=4).sharding(nn.Linear(16, 12)).options.rotary
        4
    """

    rotary: int

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if not isinstance(module, nn.Linear) or not keeps_forward(module, nn.Linear):
            raise unsupported("LatentProjection", module, (nn.Linear,))
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
